# audiorl for NVIDIA GPUs, with vLLM, Ray and DeepSpeed:
#
#     docker build --tag audiorl .
#     docker run --gpus all --shm-size 16g --volume "$PWD:/work" audiorl doctor --gpu
#
# torch brings CUDA's libraries; the machine needs the driver and NVIDIA's container toolkit.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# A C compiler and Python's headers: Triton compiles its launchers. No versions: Ubuntu keeps only the newest packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git libportaudio2 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH="/opt/venv/bin:$PATH"
COPY . /opt/audiorl
RUN pip install --no-cache-dir "/opt/audiorl[gpu,scale,metrics,speech,serve,loggers,hub]"

# Runs, data and caches of models belong to whoever starts the container: mount a folder, and --user if you like.
ENV HF_HOME=/work/.cache/huggingface
WORKDIR /work
ENTRYPOINT ["audiorl"]
CMD ["--help"]
