"""The examples of the page about modules give what the page shows."""

import doctest
import re
from pathlib import Path

import pytest

from polyattn import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"


def test_the_examples_of_the_page_run_as_shown():
    examples = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    test = doctest.DocTestParser().get_doctest(examples, {}, PAGE.name, str(PAGE), 0)
    said = []
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert result.attempted > 10
    assert not result.failed, "".join(said)


def test_errors_of_the_page_stand_as_a_traceback_prints_them():
    names = re.findall(r"^(polyattn\.\S*Error):", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert names == [f"{ConfigError.__module__}.{ConfigError.__name__}"]


@pytest.mark.parametrize("page", ["modules.md", "conventions.md"])
def test_links_to_other_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", (PAGE.parent / page).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
