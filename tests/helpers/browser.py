"""Shows SVG pictures in Chromium with fonts of a test's choice, and has it look at their texts."""

import html
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.programs import needs_program

_PAGE = Path(__file__).parent / "texts_in_boxes.html"

#: With these it starts as root, where there is no screen, and asks nothing of the network.
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-device-scale-factor=1",
]

_PATIENCE_S = 240

_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}</dir><cachedir>{folder}/cache</cachedir></fontconfig>
"""

_PROLOGUE = re.compile(r"\A.*?(?=<svg )", re.DOTALL)


def use_fonts(fonts: Sequence[Path], folder: Path) -> dict[str, str]:
    """The environment of a program that sees these fonts and no others; they are linked to in the folder."""
    folder.mkdir()
    for font in fonts:
        (folder / font.name).symlink_to(font)
    config = folder / "fonts.conf"
    config.write_text(_FONTS.format(folder=folder), encoding="utf-8")
    return {**os.environ, "FONTCONFIG_FILE": str(config)}


def open_once(
    address: str, folder: Path, environment: Mapping[str, str] = os.environ
) -> "subprocess.CompletedProcess[str]":
    """Opens a page; gives the elements that it has in the end, and what it said on the console among the errors."""
    command = [
        needs_program("chromium"),
        *OPTIONS,
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        "--dump-dom",
        address,
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)


def look_at_texts(
    pictures: Mapping[str, str], environment: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """How many texts each SVG picture has, and which of them leave their boxes, overlap, or are not as wide as said."""
    sections = (f'<section id="{name}">{_PROLOGUE.sub("", svg)}</section>' for name, svg in pictures.items())
    page = folder / "page.html"
    page.write_text(
        _PAGE.read_text(encoding="utf-8").replace("PICTURES", "\n".join(sections)), encoding="utf-8"
    )
    shown = open_once(page.as_uri(), folder, environment)
    report = re.search(r'<pre id="report">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert report, f"Chromium left no report: {shown.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(html.unescape(report[1]))
    return found
