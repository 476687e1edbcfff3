"""A page that follows a run, in Chromium: it takes over new steps, keeps what is looked at, and asks nobody else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.driven import DrivenPage
from helpers.growing_run import GrowingRun
from modtrace.cli.follow import FollowedReport, ReportServer
from modtrace.store.reader import FolderReader

pytestmark = pytest.mark.browser

PROGRESS = "document.querySelector('.follow')?.textContent"


@pytest.fixture
def page() -> Iterator[DrivenPage]:
    with DrivenPage() as driven:
        yield driven


def test_new_steps_are_taken_over_where_the_reader_is_until_the_run_has_ended(
    page: DrivenPage, tmp_path: Path
) -> None:
    run = GrowingRun(tmp_path / "run.modtrace")
    run.go_on()
    with ReportServer(FollowedReport(FolderReader(tmp_path / "run.modtrace"))) as server:
        page.ask("open", url=server.url, width=1280, height=720, scheme="light", reduced=True)
        page.ask("wait", code=f"{PROGRESS} === 'Following the run: step 1.'")
        page.go("Modules")
        page.press("ArrowDown")
        assert page.address() == {"view": "modules", "module": "0"}
        label = "document.querySelector('.steplabel').textContent"
        assert page.evaluate(label).startswith("step 1")
        run.go_on()
        page.ask("wait", code=f"{PROGRESS} === 'Following the run: step 2.'")
        page.settle()
        assert page.address() == {"view": "modules", "module": "0"}
        assert page.evaluate("document.querySelectorAll('.top, .columns, aside').length") == 3
        assert page.evaluate(label) == "3 steps, 0 to 2"
        assert page.evaluate("document.querySelector('aside').innerText").startswith("Net")
        page.press("2", "3", "2")  # one page listens, not one for each state
        assert page.address()["view"] == "modules"
        page.press("/")
        page.ask("type", text="Net")
        run.go_on()
        page.ask("wait", code=f"{PROGRESS} === 'Following the run: step 3.'")
        assert page.evaluate("document.querySelector('input').value") == "Net"
        assert page.evaluate(label) == "3 steps, 0 to 2"
        page.evaluate("document.activeElement.blur()")
        page.ask("wait", code=f"{label} === '4 steps, 0 to 3'")
        run.close()
        page.ask("wait", code=f"{PROGRESS} === 'The run has ended: step 3.'")
        assert page.ask("axe") == []
        assert [each for each in page.problems() if not each.startswith(f"request: {server.url}")] == []
    assert page.evaluate(PROGRESS) == "The run has ended: step 3."
