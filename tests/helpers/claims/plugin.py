"""pytest --write-claims; a run of all tests without it checks that CLAIMS.md is what it would write."""
from pathlib import Path

import pytest

from claims.render import ClaimError, from_folder


def pytest_addoption(parser):
    parser.addoption("--write-claims", action="store_true", help="write CLAIMS.md; needs a run of all tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "claim(*ids): the numbered claims of papers that this test checks")
    if not hasattr(config, "workerinput"):  # not in xdist's workers, but where their reports arrive
        if config.option.write_claims and not is_whole(config):
            raise pytest.UsageError("--write-claims needs a run of all tests, without names, -k or -m")
        config.pluginmanager.register(Claims(config), "claims")


def is_whole(config) -> bool:
    """Nothing on the command line leaves tests out."""
    given = [Path(config.invocation_params.dir, arg).resolve() for arg in config.args]
    everything = [Path(config.rootpath, path).resolve() for path in config.getini("testpaths") or ["."]]
    options = config.option
    return given == everything and not (
        options.keyword or options.markexpr or options.deselect or options.ignore or options.ignore_glob
        or options.collectonly or getattr(options, "lf", False))


def pytest_collection_modifyitems(items):
    for item in items:  # travels to the controller with the test's report
        item.user_properties += [("claim", x) for mark in item.iter_markers("claim") for x in mark.args]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    finally:  # numpy's and torch's numbers cannot travel
        plain = [(key, x.item() if hasattr(x, "item") else x) for key, x in item.user_properties]
        item.user_properties[:] = plain


@pytest.fixture
def note(record_property):
    """note("S3", draws=80): what tests/helpers/claims/ calls {S3.draws}."""
    def noted(claim, **values):
        for name, x in values.items():
            record_property(f"{claim}.{name}", x)
    return noted


class Claims:
    def __init__(self, config):
        self.config, self.properties, self.message = config, [], ""

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.properties.append((report.nodeid, report.user_properties))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        root, write = self.config.rootpath, self.config.option.write_claims
        if exitstatus != pytest.ExitCode.OK or not is_whole(self.config):
            self.message = "CLAIMS.md is not written, as not all tests passed" if write else ""
            return
        try:
            text, path = from_folder(root, sorted(self.properties)), root / "CLAIMS.md"
            if write:
                path.write_text(text)
                self.message = "CLAIMS.md is written"
            elif not path.exists() or path.read_text() != text:
                raise ClaimError("CLAIMS.md is not what these tests would write; pytest --write-claims")
        except ClaimError as error:
            self.message, session.exitstatus = f"claims: {error}", pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.message:
            terminalreporter.write_line(self.message)
