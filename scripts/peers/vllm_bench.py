"""Runs `vllm bench serve` without the rest of vLLM's command, which needs a device.

    PYTHONPATH=SITE python scripts/peers/vllm_bench.py --base-url URL --model NAME ...

SITE holds the package (`make test-peers` fills it); the options are those of `vllm bench serve`.
"""


def main() -> None:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # else it looks for a device
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
