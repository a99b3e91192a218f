"""`kvferry doctor --vllm-args`: the arguments of a server with vLLM's own NIXL connector, turned into ours."""

from __future__ import annotations

import json
import shlex

import pytest
from typer.testing import CliRunner

from kvferry.cli import main
from kvferry.cli.doctor.vllm_arguments import migrate
from kvferry.cli.serve.vllm import EXTENSION, MIDDLEWARE
from kvferry.errors import ConfigurationError

STOCK = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
ADDED = ("--middleware", MIDDLEWARE, "--worker-extension-cls", EXTENSION)


def of(config, *more, sign=False):
    text = json.dumps(config)
    words = (f"--kv-transfer-config={text}",) if sign else ("--kv-transfer-config", text)
    return shlex.join(("serve", "m", *words, *more))


def transfer_of(found):
    return json.loads(found.arguments[found.arguments.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("sign", [False, True])
def test_the_connector_changes_and_everything_else_stays(sign):
    config = {**STOCK, "kv_buffer_device": "cuda", "kv_load_failure_policy": "fail"}
    found = migrate(of(config, "--tensor-parallel-size", "4", sign=sign))
    assert found.arguments[:2] == ("serve", "m")
    assert found.arguments[4:] == ("--tensor-parallel-size", "4", *ADDED)
    module = {"kv_connector": "FerryConnector", "kv_connector_module_path": "kvferry.connectors.vllm"}
    assert transfer_of(found) == {**config, **module}
    assert found.findings == ()


@pytest.mark.parametrize("text", [of(STOCK), of(STOCK, sign=True), f"serve m --kv-transfer-config {json.dumps(STOCK)}"])
def test_vllm_takes_underscores_for_dashes(text):
    assert transfer_of(migrate(text.replace("--kv-transfer-config", "--kv_transfer_config")))


def test_a_configuration_key_by_key_has_to_be_written_as_one():
    with pytest.raises(ConfigurationError, match=r"write --kv-transfer-config\.key=value as JSON"):
        migrate("serve m --kv-transfer-config.kv_connector NixlConnector")


@pytest.mark.parametrize("quote", ["", "'", '"'])
@pytest.mark.parametrize("sign", ["=", " "])
def test_quotes_around_the_json_may_have_been_lost(quote, sign):
    text = f"serve m --kv-transfer-config{sign}{quote}{json.dumps(STOCK)}{quote} --max-model-len 8192"
    found = migrate(text)
    assert (transfer_of(found)["kv_connector"], found.arguments[4:6]) == ("FerryConnector", ("--max-model-len", "8192"))


def test_keys_carry_over_where_they_mean_the_same():
    extra = {"kv_lease_duration": 60, "backends": ["UCX"], "engine_ttl": 5, "made_up": [1]}
    found = migrate(of({**STOCK, "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}))
    assert transfer_of(found)["kv_connector_extra_config"] == {"kv_lease_duration": 60, "backends": ["UCX"]}
    told = [(str(finding.severity), finding.what.split(":")[0]) for finding in found.findings]
    assert told == [("note", "engine_ttl means nothing here"), ("warning", "kvferry does not know made_up")]


def test_a_value_that_the_server_would_refuse_is_said_now():
    found = migrate(of({**STOCK, "kv_connector_extra_config": {"kv_lease_duration": -1}}))
    assert "error" in [str(finding.severity) for finding in found.findings]


def test_of_several_connectors_the_stock_one_is_replaced_and_comes_first():
    children = [{"kv_connector": "OffloadingConnector"}, {**STOCK, "kv_load_failure_policy": "fail"}]
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
    names = [
        child["kv_connector"] for child in transfer_of(migrate(of(config)))["kv_connector_extra_config"]["connectors"]
    ]
    assert names == ["FerryConnector", "OffloadingConnector"]


@pytest.mark.parametrize("option", ["--enable-sleep-mode", "--enable-return-routed-experts"])
def test_what_kvferry_refuses_is_an_error(option):
    assert [finding.found for finding in migrate(of(STOCK, option)).findings if finding.severity == "error"] == [option]


@pytest.mark.parametrize(
    "text",
    [
        "serve m",
        "serve 'm",
        "--kv-transfer-config",
        "--kv-transfer-config [1]",
        of({"kv_connector": "LMCacheConnectorV1"}),
        of({}),
        of({**STOCK, "kv_connector_extra_config": 7}),
        of({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "A"}]}}),
        of({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [7]}}),
    ],
)
def test_arguments_that_say_nothing_of_it_are_refused(text):
    with pytest.raises(ConfigurationError):
        migrate(text)


def test_the_outer_policy_of_several_connectors_is_kvferrys_too():
    extra = {"connectors": [STOCK]}
    config = {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    found = migrate(of(config))
    assert transfer_of(found)["kv_connector_extra_config"]["connectors"][0]["kv_load_failure_policy"] == "recompute"
    assert found.findings == ()


@pytest.mark.parametrize("sign", ["=", " "])
def test_a_server_keeps_its_own_middleware_and_hears_of_a_class_in_the_way(sign):
    words = shlex.split(f"--middleware{sign}my.Own --worker-extension-cls{sign}my.Class")
    found = migrate(of({**STOCK, "kv_load_failure_policy": "fail"}, *words))
    assert found.arguments[-2:] == ("--middleware", MIDDLEWARE)
    assert (EXTENSION in found.arguments, [str(finding.severity) for finding in found.findings]) == (False, ["warning"])


def test_what_is_printed_can_be_pasted():
    result = CliRunner().invoke(main.app, ["doctor", "--vllm-args", of(STOCK, "--max-model-len", "8192")])
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout)
    assert json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector"] == "FerryConnector"
    assert "kv_load_failure_policy is not given" in result.stderr
    # What it says of itself is not changed once more.
    assert migrate(result.stdout).arguments == tuple(words)


def test_machines_get_json():
    result = CliRunner().invoke(main.app, ["doctor", "--json", "--vllm-args", of(STOCK, "--enable-sleep-mode")])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["severity"], told["arguments"][0]) == (2, "error", "serve")
