# All five commands on a machine with an NVIDIA GPU, its container toolkit and a driver for CUDA 13 (580 or later):
#   docker build -t dflash-toolkit .
#   docker run --gpus all -v ~/.cache/huggingface:/models -v "$PWD":/work -p 127.0.0.1:8000:8000 dflash-toolkit \
#     dflash-serve --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --host 0.0.0.0
# The image takes about 8 GB: torch brings CUDA's libraries. It runs as user 1000; if your folders belong to another user,
# add --user "$(id -u):$(id -g)".
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# dependencies first: only a change of these two files installs them again
WORKDIR /opt/dflash-toolkit
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt $(grep '^torch==' constraints.txt)
COPY pyproject.toml .
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [project['optional-dependencies'][name] for name in ('train', 'serve', 'gpu', 'linear-attention')]; \
print(*project['dependencies'], *sum(extras, []), sep='\n')" > requirements.txt \
    && pip install --no-cache-dir -c constraints.txt -r requirements.txt

COPY README.md LICENSE ./
COPY train train
COPY serve serve
COPY dflash_toolkit dflash_toolkit
RUN pip install --no-cache-dir --no-deps .

# any user may write the caches: of models, of compiled kernels, of step times
RUN useradd --create-home --uid 1000 dflash && mkdir -p /models /work && chmod 1777 /home/dflash /models /work
USER dflash
ENV HOME=/home/dflash HF_HOME=/models
WORKDIR /work
EXPOSE 8000
CMD ["dflash-serve", "--help"]
