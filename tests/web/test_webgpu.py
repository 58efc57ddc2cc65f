"""WebGPU, by an adapter in software: the same tokens, and wasm for the graphs that it does not take."""

import shutil

from browser import TEXT, chromium, greedy, opened, run, served, set_value

from unrolled.interop.web.runtime import runtime_files, write_runtime

ADAPTER = ("--enable-unsafe-webgpu", "--enable-unsafe-swiftshader", "--use-webgpu-adapter=swiftshader")


def test_the_tokens_are_those_of_pytorch(site, models, tmp_path):
    page = tmp_path / "page"
    shutil.copytree(site, page)
    write_runtime(page / "runtime", runtime_files(webgpu=True), [])
    with served(page) as address, chromium(*ADAPTER) as browser:
        opened(browser, address)
        assert "on WebGPU" in browser.find_element("id", "runtime").text
        set_value(browser, "temperature", "0")
        made = run(browser)
        opened(browser, address, TEXT)
        set_value(browser, "temperature", "0")
        set_value(browser, "count", "100")
        made |= run(browser)
    for name, result in made.items():
        assert result["ids"] == greedy(models[name][0], result["prompt"], len(result["ids"])), name
