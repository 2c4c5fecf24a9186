"""The default dataset of prompts: its sources and licences, for users and for model cards."""

DEFAULT = "mlabonne/open-perfectblend"
ROWS = 1_420_909
DOWNLOAD_GB = 1.5
# names on the hub; each has its own licence
SOURCES = (
    "HuggingFaceH4/ultrachat_200k",
    "meta-math/MetaMathQA",
    "openbmb/UltraInteract_sft",
    "microsoft/orca-math-word-problems-200k",
    "HuggingFaceH4/ultrafeedback_binarized",
    "theblackcat102/evol-codealpaca-v1",
    "Post-training-Data-Flywheel/AutoIF-instruct-61k",
    "mlabonne/lmsys-arena-human-preference-55k-sharegpt",
)
LICENCE = "its hub page has the tag apache-2.0, its sources have their own licences"


def described(name: str) -> str:
    """Returns a sentence on the licence and the content of a dataset of the hub."""
    if name != DEFAULT:
        return f"{name}: see its dataset card for its licence"
    return (
        f"{DEFAULT}: {ROWS:,} conversations, with a slight focus on maths, from {', '.join(SOURCES)}; {LICENCE}: check "
        f"both before you train for a product"
    )
