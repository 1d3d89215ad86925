"""The page of a report: complete, self-contained, and readable in a browser in light and dark where there is one."""

import json
import logging
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

import pure_backend
from pure_backend.inspect.found import Found, Graph, Node
from pure_backend.inspect.page import page
from pure_backend.inspect.picture import COLOURS, picture
from pure_backend.ir.impurity import Impurity

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
VOID = {"meta", "br"}
LOADS = {"src", "href", "data", "srcset", "poster", "action"}
READABLE = 4.5  # contrast of text on its background, https://www.w3.org/TR/WCAG22/#contrast-minimum


@pure_backend.impure
def watch(x):
    return x.clone()


def model(x, w):
    y = (x @ w).sin().cos().exp()
    z = watch(y)
    torch._dynamo.graph_break()
    return (z @ w).tanh() * 2 + 1


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The page of a function with all that a page can show."""
    logging.getLogger("pure_backend").setLevel(logging.CRITICAL)
    report = pure_backend.explain(model)(torch.ones(3, 3, requires_grad=True), torch.ones(3, 3))
    logging.getLogger("pure_backend").setLevel(logging.NOTSET)
    return report.save_html(tmp_path_factory.mktemp("page") / "report.html").read_text()


class Checker(HTMLParser):
    """Collects elements and texts, and what is not closed or loads something."""

    def __init__(self, html):
        super().__init__()
        self.open, self.seen, self.faults, self.texts = [], [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        self.faults += [f"{tag} {name}" for name, _ in attrs if name in LOADS or name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")

    def handle_data(self, data):
        self.texts.append(data)


def test_page_is_well_formed_and_loads_nothing(html):
    checker = Checker(html)
    assert (checker.faults, checker.open) == ([], [])
    assert {tag for tag, _ in checker.seen} & {"script", "link", "img", "iframe", "object", "embed", "base"} == set()
    assert re.findall(r"url\(|@import", html) == []
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}


def test_page_shows_partitions_impurities_and_breaks(html):
    text = " ".join(Checker(html).texts)
    for part in (
        "Partitions",
        "impure: opt-out",
        "drop pure_backend.impure",
        "User-inserted graph break",
        "traces ",
        "seconds: ",
    ):
        assert part in text


def test_picture_has_a_box_a_node_and_an_edge_an_input(html):
    checker = Checker(html)
    kinds = [attrs["class"] for tag, attrs in checker.seen if tag == "g"]
    assert kinds.count("impure") == 1
    assert kinds.count("p0") == 4
    assert "input" in kinds
    assert sum(tag == "rect" for tag, _ in checker.seen) == len(kinds)
    assert sum(tag == "svg" for tag, _ in checker.seen) == 2


def test_boxes_do_not_overlap(html):
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        places = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', svg)
        boxes = [tuple(map(int, place)) for place in places]
        for i, (x, y, w, h) in enumerate(boxes):
            assert all(abs(x - a) >= w or abs(y - b) >= h for a, b, *_ in boxes[:i])


def test_names_are_escaped():
    node = Node("a<b", "f&g", '"<script>"', ())
    drawn = picture(Graph((node,)), "<title>")
    assert "<script>" not in drawn and "a&lt;b = f&amp;g" in drawn and "&lt;title&gt;" in drawn


def test_empty_graph_has_a_picture():
    assert "</svg>" in picture(Graph(()), "nothing")


# ---------------------------------------------------------------------------------------------------- in a browser

PROBE = """
<script>
const rgb = text => text.match(/[\\d.]+/g).map(Number)
const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4
const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2])
const contrast = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05)
const style = (element, name) => rgb(getComputedStyle(element)[name])
const page = style(document.body, "backgroundColor")
const on_page = [...document.querySelectorAll("h1, h2, p, td, th, pre")].map(e => contrast(style(e, "color"), page))
const in_boxes = [...document.querySelectorAll("svg text, svg tspan")].map(
  e => contrast(style(e, "fill"), style(e.closest("g").querySelector("rect"), "fill")))
const outside = [...document.querySelectorAll("svg text")].filter(e => {
  const box = e.closest("g").querySelector("rect").getBoundingClientRect(), text = e.getBoundingClientRect()
  return text.right > box.right + 1 || text.bottom > box.bottom + 1
}).length
const fills = [...new Set([...document.querySelectorAll("svg rect")].map(e => getComputedStyle(e).fill))]
const loads = performance.getEntriesByType("resource").length
document.body.textContent = ""
document.body.dataset.result = JSON.stringify(
  {page, contrast: Math.min(...on_page), boxes: Math.min(...in_boxes), outside, fills, loads})
</script>
"""


def probed(html, scheme, folder):
    """What a headless browser sees of the page."""
    path = folder / "probed.html"
    # The page forbids scripts; the probe is one.
    path.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", html).replace("</body>", PROBE + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (result,) = re.findall(r'data-result="([^"]*)"', dom)
    return json.loads(result.replace("&quot;", '"'))


def every_colour():
    """The page of a graph with more partitions than colours, an impure node, an eager node and an input."""
    impurity = Impurity("host read", "n", "Tensor.item", "it reads a value")
    nodes = [Node(f"n{i}", "torch.sin", "f32[3]", (), partition=i) for i in range(len(COLOURS) + 1)]
    nodes += [Node("n", "Tensor.item", "f32[3]", (), impurity=impurity), Node("e", "torch.cos", "f32[3]", ())]
    nodes += [Node("an_input_with_a_name_that_does_not_fit_into_its_box", "", "f32[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]", ())]
    return page(Found((Graph(tuple(nodes), (impurity,), "a reason"),), (), (), pure_backend.statistics()))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("scheme", "dark"), [(0, True), (1, False)])
@pytest.mark.parametrize("made", [False, True])
def test_browser_shows_a_readable_page(made, scheme, dark, html, tmp_path):
    seen = probed(every_colour() if made else html, scheme, tmp_path)
    assert (max(seen["page"][:3]) < 64) is dark
    assert seen["contrast"] >= READABLE and seen["boxes"] >= READABLE, seen
    assert seen["outside"] == 0
    assert len(seen["fills"]) >= (len(COLOURS) + 3 if made else 4)  # one a partition; impure, eager, input
    assert seen["loads"] == 0
