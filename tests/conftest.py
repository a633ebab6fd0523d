"""Fixtures of the Python tests, and the record of what really ran: clause x ISA x (x type, output type), and tests per file."""

from collections import Counter, defaultdict
from pathlib import Path

import kvquant
import pytest
from cases import PAIRS

CLAUSES = [f"C{n}" for n in range(1, 9)] + [f"I{n}" for n in range(1, 11)]
# The tests that may be skipped, one a line, each with its reason after a space.
MAY_SKIP = [line.split(maxsplit=1)[0] for line in Path(__file__).with_name("skips.txt").read_text().splitlines() if line]
CELLS = Counter()  # (clause, isa, pair) -> how many tests compared compiled calls
RECORDED = Path(__file__).with_name("recorded.txt")  # how many tests each file has at least, a test of several ISAs counted once
RAN = defaultdict(set)  # file -> its tests that ran, or that may be skipped and were
LEFT_OUT = set()  # files that may be skipped and were


def pytest_addoption(parser):
    parser.addoption("--record-counts", action="store_true", help="write tests/recorded.txt from the files that run")


@pytest.hookimpl(trylast=True)  # so that the ISAs of one test follow each other, and share what it caches
def pytest_generate_tests(metafunc):
    """A test that takes `isa` runs under every ISA of this machine; one that takes `pair`, for every type pair."""
    own = {name for mark in metafunc.definition.iter_markers("parametrize") for name in str(mark.args[0]).split(", ")}
    wanted = set(metafunc.fixturenames) - own
    if "pair" in wanted:
        metafunc.parametrize("pair", PAIRS, ids="-".join)
    if "isa" in wanted:
        metafunc.parametrize("isa", kvquant.isa.available())


def pytest_collection_modifyitems(items):
    """The check for empty cells has to see all the others."""
    items.sort(key=lambda item: item.name.startswith("test_matrix"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A skip that is not on the list is a failure."""
    report = yield
    if report.skipped and item.nodeid.removeprefix("tests/") not in MAY_SKIP:
        report.outcome, report.longrepr = "failed", f"skipped, but not on the list tests/skips.txt: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same for a file that is skipped as a whole."""
    report = yield
    if report.skipped:
        LEFT_OUT.add(collector.nodeid.removeprefix("tests/"))
    if report.skipped and collector.nodeid.removeprefix("tests/") not in MAY_SKIP:
        report.outcome, report.longrepr = "failed", f"skipped, but not on the list tests/skips.txt: {report.longrepr}"
    return report


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed or report.skipped:
        file, _, test = report.nodeid.removeprefix("tests/").partition("::")
        name, _, parameters = test.partition("[")
        isas = {*kvquant.isa.available(), "reference"}
        RAN[file].add((name, *(part for part in parameters.rstrip("]").split("-") if part not in isas)))


def recorded():
    lines = RECORDED.read_text().splitlines() if RECORDED.exists() else []
    return {file: int(count) for count, file in map(str.split, lines)}


def too_few(config, expected, ran):
    """Sentences about files of which fewer tests ran than are recorded; none where tests were chosen by hand."""
    chosen = config.getoption("keyword") or config.getoption("markexpr") or config.getoption("deselect")
    if chosen or any("::" in argument for argument in config.args):
        return []
    all_files = any(Path(argument).is_dir() for argument in config.args)
    files = {file for file in expected if all_files or file in ran} - LEFT_OUT
    return [f"{file}: {len(ran.get(file, ()))} tests ran, {expected[file]} are recorded in tests/recorded.txt"
            for file in sorted(files) if len(ran.get(file, ())) < expected[file]]  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A run that lost tests fails, whatever became of them."""
    if session.config.option.collectonly or session.shouldstop or session.shouldfail:
        return
    if session.config.getoption("record_counts"):
        counts = recorded() | {file: len(tests) for file, tests in RAN.items()}
        RECORDED.write_text("".join(f"{count} {file}\n" for file, count in sorted(counts.items())))
    session.config.lost_tests = too_few(session.config, recorded(), RAN)
    if session.config.lost_tests and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def executed():
    """executed("C1 I2", isa, pair): a compiled call under this ISA was compared with what these clauses demand."""

    def record(clauses, isa, pair):
        for clause in clauses.split():
            assert clause in CLAUSES
            CELLS[clause, isa, pair] += 1

    record.cells = CELLS
    return record


def pytest_terminal_summary(terminalreporter):
    for sentence in getattr(terminalreporter.config, "lost_tests", []):
        terminalreporter.write_line(f"ERROR {sentence}", red=True)
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.write_line(f"left out: {report.nodeid}: {report.longrepr[2]}")
    if not CELLS:
        return
    terminalreporter.section("tests that compared compiled calls, by clause")
    for isa in kvquant.isa.available():
        counts = {clause: sum(n for key, n in CELLS.items() if key[:2] == (clause, isa)) for clause in CLAUSES}
        terminalreporter.write_line(f"{isa:12}" + " ".join(f"{clause}:{n}" for clause, n in counts.items()))
    for isa, rows in kvquant._core.rows_written().items():
        terminalreporter.write_line(f"{isa:12}{rows} rows quantised and written")
