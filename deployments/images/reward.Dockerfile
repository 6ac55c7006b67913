# The reward function: the smallest image, so that it is up soon.
FROM python:3.11.14-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 rollart

COPY deployments/locks/reward.txt /tmp/lock.txt
RUN pip install --no-deps -r /tmp/lock.txt

# The code comes last: a change of it installs nothing again. It stays a folder, as deployments run the flows in one.
WORKDIR /opt/rollart
COPY . .
RUN pip install --no-deps --no-build-isolation --editable .
USER 1000

CMD ["rollart", "worker", "serverless-reward"]
