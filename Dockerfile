# accel on CPUs or on GPUs, from the wheels of this checkout.
#
#   docker build -t accel .
#   docker build -t accel:cuda --build-arg TORCH_INDEX= .     # torch of the public index, which is built for CUDA
#   docker run --rm --shm-size 1g accel accel launch --num_processes 2 --cpu /opt/accel/gan.py
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheels
WORKDIR /src
COPY packages packages
COPY testing testing
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist ./packages/* ./testing

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=2.13
# Compilers: inductor and DeepSpeed build kernels on first use.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ openssh-client && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch==${TORCH}.*"
COPY --from=wheels /dist /dist
RUN pip install --no-cache-dir /dist/*.whl && rm -rf /dist
COPY examples/*.py /opt/accel/
# By number: Kubernetes refuses to run a name as one that is certainly not root.
RUN useradd --create-home --uid 1000 accel
USER 1000
WORKDIR /home/accel
CMD ["accel", "env"]
