# vLLM engines. CUDA comes with the locked wheels; the node brings the driver.
FROM python:3.11.14-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 rollart

# Triton and FlashInfer compile when they first run. Versions are those of the base image's Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/*

COPY deployments/locks/engine.txt /tmp/lock.txt
RUN pip install --no-deps -r /tmp/lock.txt
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The code comes last: a change of it installs nothing again. It stays a folder, as deployments run the flows in one.
WORKDIR /opt/rollart
COPY . .
RUN pip install --no-deps --no-build-isolation --editable .
USER 1000

CMD ["rollart", "worker", "gpu-bandwidth"]
