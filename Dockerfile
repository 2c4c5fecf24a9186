# All five commands on a machine with an NVIDIA GPU and its container toolkit:
#   docker build -t dflash-toolkit .
#   docker run --gpus all -v ~/.cache/huggingface:/models -v "$PWD":/work -p 8000:8000 dflash-toolkit \
#     dflash-serve --target Qwen/Qwen3-8B --drafter out/dflash-Qwen3-8B --host 0.0.0.0
# torch's wheels bring CUDA's libraries; the driver is the host's.
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/dflash-toolkit
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt $(grep '^torch==' constraints.txt)
COPY pyproject.toml README.md LICENSE ./
COPY dflash_toolkit dflash_toolkit
COPY train train
COPY serve serve
RUN pip install --no-cache-dir -c constraints.txt '.[train,serve,gpu]'

ENV HF_HOME=/models
WORKDIR /work
EXPOSE 8000
CMD ["dflash-serve", "--help"]
