"""A folder of runs: found as they come, told by name, listed with what matters, changed only inside the folder."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.optional import need
from tests.viewer.browsing import Hand, Visit
from tests.viewer.recordings import small_run
from tests.viewer.wire import unpack

import torchtap as tt
from torchtap.errors import TorchtapError
from torchtap.viewer.charts import smoothed
from torchtap.viewer.manage import manage
from torchtap.viewer.open_run import Refused
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import USUAL_PORT, Policy, ViewerServer, answer, application


def listed(catalog: Catalog, since: int = 0) -> Any:
    catalog.look(force=True)
    return json.loads(answer(catalog, "runs", {"since": str(since)}))


def test_runs_are_named_by_their_place_in_the_folder(shelf_folder: Path) -> None:
    names = Catalog.open([shelf_folder]).names()
    assert sorted(names) == ["run-4", "run-5", *(f"sweep/run-{n}" for n in range(4))]


def test_a_run_that_comes_or_goes_is_noticed_and_only_news_are_sent(shelf_folder: Path) -> None:
    catalog = Catalog.open([shelf_folder])
    first = listed(catalog)
    while listed(catalog)["judging"]:
        pass
    tick = listed(catalog)["tick"]
    assert listed(catalog, tick)["runs"] == []
    small_run(shelf_folder / "late" / "comer")
    fresh = listed(catalog, tick)
    assert [run["name"] for run in fresh["runs"]] == ["late/comer"]
    shutil.rmtree(shelf_folder / "run-4")
    left = listed(catalog, fresh["tick"])
    assert "run-4" not in left["names"]
    assert len(left["names"]) == len(first["names"])
    with pytest.raises(Refused, match="no run called 'run-4'"):
        catalog["run-4"]


def test_a_line_tells_steps_loss_labels_size_and_findings(shelf_folder: Path) -> None:
    catalog = Catalog.open([shelf_folder])
    while listed(catalog)["judging"]:
        pass
    line = next(run for run in listed(catalog)["runs"] if run["name"] == "sweep/run-1")
    run = tt.open(shelf_folder / "sweep" / "run-1")
    assert line["loss"]["last"] == run.series(":value.loss", "value").values[-1]
    assert line["labels"] == {"lr": 0.01, "optimizer": "adam", "seed": 1}
    assert (line["steps"], line["status"]) == (20, "closed")
    files = [path for path in (shelf_folder / "sweep" / "run-1").rglob("*") if path.is_file()]
    assert line["size"] == sum(path.stat().st_size for path in files)
    found = tt.diagnose(run)
    judged = found.verdict != "not judged"
    assert line["findings"] == {"errors": 0, "warnings": len(found), "judged": judged}


def test_a_broken_run_does_not_take_the_others_with_it(shelf_folder: Path) -> None:
    manifest = next((shelf_folder / "run-4").rglob("manifest.json"))
    for scalars in (shelf_folder / "run-4").rglob("scalars*"):
        scalars.write_bytes(b"\xff" * 100)
    manifest.write_text("{")
    runs = {run["name"]: run for run in listed(Catalog.open([shelf_folder]))["runs"]}
    assert len(runs) == 6
    assert runs["run-5"]["steps"] == 20


def test_a_link_in_the_folder_leads_nowhere(shelf_folder: Path, tmp_path: Path) -> None:
    small_run(tmp_path / "outside")
    (shelf_folder / "inside").symlink_to(tmp_path / "outside")
    assert "inside" not in Catalog.open([shelf_folder]).names()


def test_equal_names_are_told_apart_and_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    small_run(tmp_path / "a" / "run")
    small_run(tmp_path / "b" / "run")
    assert Catalog.open([tmp_path / "a/run", tmp_path / "b/run"]).names() == ["a/run", "b/run"]
    assert sorted(Catalog.open([tmp_path / "a", tmp_path / "b"]).names()) == ["a/run", "b/run"]
    with pytest.raises(TorchtapError, match="no run and no folder"):
        Catalog.open([tmp_path / "nowhere"])


def test_an_empty_folder_waits_for_its_first_run(tmp_path: Path) -> None:
    catalog = Catalog.open([tmp_path])
    assert listed(catalog)["runs"] == []
    small_run(tmp_path / "first")
    assert listed(catalog)["names"] == ["first"]


# --- changing runs ------------------------------------------------------------------------------------------


def test_runs_are_renamed_tagged_archived_and_deleted(shelf_folder: Path) -> None:
    catalog = Catalog.open([shelf_folder])
    manage(catalog, {"run": "run-4", "action": "rename", "value": "best one"})
    assert "best one" in catalog.names()
    manage(catalog, {"run": "best one", "action": "tag", "value": ["good", " good ", "", "kept"]})
    manage(catalog, {"run": "best one", "action": "archive", "value": True})
    line = next(run for run in listed(catalog)["runs"] if run["name"] == "best one")
    assert (line["tags"], line["archived"], line["steps"]) == (["good", "kept"], True, 20)
    manage(catalog, {"run": "sweep/run-0", "action": "delete", "value": "run-0"})
    assert not (shelf_folder / "sweep" / "run-0").exists()
    assert (shelf_folder / "sweep" / "run-1").exists()


@pytest.mark.parametrize(
    ("run", "action", "value"),
    [
        ("run-4", "rename", "../elsewhere"),
        ("run-4", "rename", ".."),
        ("run-4", "rename", ""),
        ("run-4", "rename", "sweep/new"),
        ("run-4", "rename", "run-5"),
        ("run-4", "rename", "a\0b"),
        ("run-4", "delete", "yes"),
        ("run-4", "delete", None),
        ("sweep", "delete", "sweep"),
        ("..", "delete", ".."),
        ("../runs/run-4", "delete", "run-4"),
        ("", "delete", ""),
        ("run-4", "format", "c"),
        ("run-4", "tag", "word"),
    ],
)
def test_nothing_else_is_touched(shelf_folder: Path, run: str, action: str, value: Any) -> None:
    before = sorted(str(path) for path in shelf_folder.parent.rglob("*"))
    with pytest.raises(Refused):
        manage(Catalog.open([shelf_folder]), {"run": run, "action": action, "value": value})
    assert sorted(str(path) for path in shelf_folder.parent.rglob("*")) == before


def test_a_run_that_was_named_itself_or_is_being_written_stays(tmp_path: Path) -> None:
    small_run(tmp_path / "named")
    with pytest.raises(Refused, match="inside a folder"):
        manage(Catalog.open([tmp_path / "named"]), {"run": "named", "action": "delete", "value": "named"})
    writer = small_run(tmp_path / "shelf" / "written", close=False)
    try:
        catalog = Catalog.open([tmp_path / "shelf"])
        for action, value in (("delete", "written"), ("rename", "other")):
            with pytest.raises(Refused, match="still being written"):
                manage(catalog, {"run": "written", "action": action, "value": value})
    finally:
        writer.close()


def test_a_note_is_never_written_through_a_link(shelf_folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    run = shelf_folder / "run-4"
    for name in (".notes.json.part", "notes.json"):
        (run / name).symlink_to(outside)
    manage(Catalog.open([shelf_folder]), {"run": "run-4", "action": "tag", "value": ["good"]})
    assert outside.read_text() == "mine"
    assert (run / "notes.json").is_file()
    assert not (run / "notes.json").is_symlink()
    assert not (run / ".notes.json.part").exists()


@pytest.mark.parametrize("body", [b"[" * 90_000, b'{"a":' * 15_000, b"{", b"\xff", b""])
def test_a_body_that_is_no_json_is_refused_as_such(shelf_folder: Path, body: bytes) -> None:
    testclient = need("starlette.testclient")
    policy = Policy.of("127.0.0.1", manage=True)
    base = "http://127.0.0.1:8000"
    client = testclient.TestClient(application(Catalog.open([shelf_folder]), policy), base_url=base)
    answer = client.post(
        f"/manage?token={policy.token}", content=body, headers={"origin": base, "x-torchtap": "page"}
    )
    assert (answer.status_code, answer.json()) == (400, {"error": "this is no JSON"})


def test_only_the_page_of_a_viewer_that_manages_may_change_runs(shelf_folder: Path) -> None:
    testclient = need("starlette.testclient")
    base = "http://127.0.0.1:8000"
    asked = {"run": "run-4", "action": "delete", "value": "run-4"}
    page = {"origin": base, "x-torchtap": "page"}
    for managing, headers, expected in [
        (False, page, 405),
        (True, {"origin": base}, 405),
        (True, {"x-torchtap": "page"}, 405),
        (True, {"origin": "http://evil.example", "x-torchtap": "page"}, 403),
    ]:
        policy = Policy.of("127.0.0.1", manage=managing)
        client = testclient.TestClient(application(Catalog.open([shelf_folder]), policy), base_url=base)
        address = f"/manage?token={policy.token}"
        assert client.post(address, json=asked, headers=headers).status_code == expected
    policy = Policy.of("127.0.0.1", manage=True)
    client = testclient.TestClient(application(Catalog.open([shelf_folder]), policy), base_url=base)
    assert client.post("/manage", json=asked, headers=page).status_code == 403  # no token
    assert (shelf_folder / "run-4").exists()
    assert client.post(f"/manage?token={policy.token}", json=asked, headers=page).status_code == 200
    assert not (shelf_folder / "run-4").exists()


def test_the_page_deletes_a_run_only_after_its_name_was_written(browser: Any, shelf_folder: Path) -> None:
    server = ViewerServer(Catalog.open([shelf_folder]), manage=True)
    with server, Visit(browser, server.address) as visit:
        page = visit.go("#/runs")
        hand = Hand(visit)
        hand.click("tr:has-text('run-5') .actions button:text-is('tag')")
        page.fill("dialog input", "diverged, keep")
        page.keyboard.press("Enter")
        page.wait_for_selector("tr:has-text('run-5') .chip:text-is('diverged')")
        hand.click("tr:has-text('run-5') .actions button:text-is('archive')")
        page.wait_for_selector("text=1 archived")
        page.wait_for_selector("tr:has-text('run-5')", state="detached")
        hand.click("tr:has-text('run-4') .actions button:text-is('delete')")
        assert page.locator("dialog button.grave").is_disabled()
        page.fill("dialog input", "run-4")
        page.click("dialog button.grave")
        page.wait_for_selector("tr:has-text('run-4')", state="detached")
    assert not (shelf_folder / "run-4").exists()
    assert (shelf_folder / "run-5").exists()


# --- values, maps and differences ---------------------------------------------------------------------------


def ask(catalog: Catalog, question: str, **parameters: Any) -> Any:
    return unpack(answer(catalog, question, {k: str(v) for k, v in parameters.items()}))


def test_a_logged_value_comes_with_its_epochs_and_seconds(shelf_folder: Path) -> None:
    catalog = Catalog.open([shelf_folder])
    _, arrays = ask(catalog, "scalars", run="run-4", site=":value.loss", smooth=600)
    loss = tt.open(shelf_folder / "run-4").series(":value.loss", "value").values
    np.testing.assert_array_equal(arrays["value"], loss)
    np.testing.assert_array_equal(arrays["epochs"], np.arange(20) // 5)
    np.testing.assert_array_equal(arrays["seconds"], 2.0 * np.arange(20))
    np.testing.assert_allclose(arrays["smooth"], smoothed(loss, 0.6))


def test_smoothing_is_an_average_without_a_start_and_without_what_is_not_finite() -> None:
    values = np.array([4.0, 2.0, np.nan, 8.0])
    weights = [[1.0], [0.5, 1.0], None, [0.25, 0.5, 1.0]]
    finite = [4.0, 2.0, 8.0]
    expected = [4.0, np.average([4, 2], weights=weights[1]), np.nan, np.average(finite, weights=weights[3])]
    np.testing.assert_allclose(smoothed(values, 0.5), expected)


def test_folded_rows_hold_the_extremes_of_their_modules(run_folder: Path) -> None:
    catalog = Catalog.open([run_folder])
    facts, arrays = ask(catalog, "map", statistic="std", kind="output", fold=2, to=20)
    assert "blocks.0" in facts["names"]
    row = facts["names"].index("blocks.0")
    run = tt.open(run_folder)
    inside = [s for s in run.sites() if s.startswith("blocks.0") and s.endswith(":output")]
    values = np.stack([run.series(site, "std").values[:21] for site in inside])
    np.testing.assert_allclose(arrays["low"][row], values.min(axis=0), rtol=1e-6)
    np.testing.assert_allclose(arrays["high"][row], values.max(axis=0), rtol=1e-6)
    starts = arrays["bandStarts"]
    assert set(facts["sites"][starts[row] : starts[row + 1]]) == set(inside)


def test_the_difference_of_two_runs_is_theirs(run_folder: Path, other_folder: Path) -> None:
    catalog = Catalog.open([run_folder, other_folder])
    asked = {"run": "first", "against": "second", "statistic": "rms", "kind": "output", "under": "head"}
    a, b = (tt.open(f).series("head:output", "rms").values for f in (run_folder, other_folder))
    _, arrays = ask(catalog, "map", **asked)
    np.testing.assert_allclose(arrays["low"][0][:24], (a - b)[:24], rtol=1e-4)
    _, arrays = ask(catalog, "map", **asked, change="relative")
    np.testing.assert_allclose(arrays["low"][0][:24], ((a - b) / np.abs(b))[:24], rtol=1e-4)


def test_every_rank_of_a_site_is_a_row(tmp_path: Path) -> None:
    from torchtap.store.record import ScalarBlock, StepRecord
    from torchtap.store.write.writer import RunWriter

    for rank in range(3):
        with RunWriter(tmp_path / "run", rank=rank, world=3, manifest={}) as writer:
            for step in range(4):
                block = ScalarBlock(("a:output",), ("rms",), np.array([[10.0 * rank + step]]))
                writer.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
    facts, arrays = ask(Catalog.open([tmp_path / "run"]), "ranks", site="a:output", statistic="rms")
    assert facts["ranks"] == [0, 1, 2]
    np.testing.assert_array_equal(arrays["low"], 10.0 * np.arange(3)[:, None] + np.arange(4))


def test_the_entropy_of_attention_is_that_of_its_rows(run_folder: Path) -> None:
    site = "blocks.0.attn:attention"
    _, arrays = ask(Catalog.open([run_folder]), "entropy", site=site)
    weights = tt.open(run_folder).tensor(site, step=5).double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -np.where(weights > 0, weights * np.log2(weights), 0).sum(axis=-1)
    at = arrays["steps"].tolist().index(5)
    np.testing.assert_allclose(arrays["entropy"][at], bits.mean(axis=(0, 2)))


def test_a_bell_is_one_peak_on_the_default_axis(tmp_path: Path) -> None:
    import torch

    class Noise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.randn(20_000, generator=torch.Generator().manual_seed(int(x)))

    model = torch.nn.Sequential(Noise())
    with tt.watch(model, tmp_path / "run", [tt.tap("0:output", keep=tt.Histogram())]) as watch:
        for step in range(2):
            with watch.step(step):
                model(torch.tensor(step))
    _, arrays = ask(Catalog.open([tmp_path / "run"]), "histograms", site="0:output")
    centres = (arrays["edges"][:-1] + arrays["edges"][1:]) / 2
    bell = np.exp(-(centres**2) / 2) / np.sqrt(2 * np.pi)
    assert np.abs(arrays["density"][0] - bell).max() < 0.12
    assert abs(centres[arrays["density"][0].argmax()]) < 0.5


def test_the_usual_port_is_kept_and_the_next_is_taken_when_it_is_not_free(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    catalog = Catalog.open([tmp_path / "run"])
    first = ViewerServer(catalog, port=None)
    second = ViewerServer(catalog, port=None)
    try:
        assert USUAL_PORT <= first.port < second.port < USUAL_PORT + 20
        with pytest.raises(OSError, match="in use"):
            ViewerServer(catalog, port=first.port)
    finally:
        first._socket.close()
        second._socket.close()


def test_a_thousand_runs_are_listed_at_once_and_fill_in(tmp_path: Path) -> None:
    small_run(tmp_path / "runs" / "run-0000", steps=2)
    for number in range(1, 300):
        shutil.copytree(
            tmp_path / "runs" / "run-0000", tmp_path / "runs" / f"run-{number:04d}", copy_function=os.link
        )
    catalog = Catalog.open([tmp_path / "runs"])
    first = json.loads(answer(catalog, "runs", {}))
    assert len(first["names"]) == len(first["runs"]) == 300
    until = time.monotonic() + 60
    while json.loads(answer(catalog, "runs", {}))["pending"] and time.monotonic() < until:
        pass
    assert all(run["steps"] == 2 for run in json.loads(answer(catalog, "runs", {}))["runs"])
