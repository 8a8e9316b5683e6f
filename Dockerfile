# syntax=docker/dockerfile:1
#
# Two images:
#   docker build --target serve -t bft-serve .                          the service; no torch inside
#   docker build --target serve --build-arg VARIANT=cuda -t bft-serve:cuda .    the same on an NVIDIA GPU
#   docker build --target train -t bft-train .                          training and retraining, by hand or by supercronic
#
# torch comes as the package index gives it: for Linux on x86-64 usually the CUDA build, which also runs on a
# CPU but weighs several GB. For the CPU build, pass the address of an index that has one as a build secret:
#   PIP_EXTRA_INDEX_URL=... docker build --secret id=PIP_EXTRA_INDEX_URL --target train -t bft-train .

ARG VARIANT=cpu

# ---- the Python under everything; SERVE_EXTRA names the one ONNX Runtime that goes with it -----------------

FROM python:3.11-slim-bookworm AS base-cpu
ENV SERVE_EXTRA=serve

# onnxruntime-gpu of constraints.txt wants CUDA 13 and cuDNN 9.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 AS base-cuda
ENV SERVE_EXTRA=serve-gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# ---- installation ------------------------------------------------------------------------------------------

FROM base-${VARIANT} AS install-serve
ENV VIRTUAL_ENV=/opt/bft
WORKDIR /build
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY model ./model
COPY service ./service
COPY training ./training
RUN python3 -m venv "$VIRTUAL_ENV" \
    && "$VIRTUAL_ENV/bin/pip" install --no-cache-dir --constraint constraints.txt ".[$SERVE_EXTRA]"

# torch brings its own CUDA libraries, so training needs no CUDA base.
FROM base-cpu AS install-train
ENV VIRTUAL_ENV=/opt/bft
WORKDIR /build
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY model ./model
COPY service ./service
COPY training ./training
RUN --mount=type=secret,id=PIP_EXTRA_INDEX_URL,env=PIP_EXTRA_INDEX_URL \
    python3 -m venv "$VIRTUAL_ENV" \
    && "$VIRTUAL_ENV/bin/pip" install --no-cache-dir --constraint constraints.txt ".[train,mlflow]"

# ---- supercronic, a cron for containers ---------------------------------------------------------------------

FROM base-cpu AS supercronic
ARG TARGETARCH=amd64
ARG SUPERCRONIC=https://github.com/aptible/supercronic/releases/download/v0.2.33/supercronic-linux
RUN case "$TARGETARCH" in \
      amd64) sum=71b0d58cc53f6bd72cf2f293e09e294b79c666d8 ;; \
      arm64) sum=e0f0c06ebc5627e43b25475711e694450489ab00 ;; \
    esac \
    && python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' \
       "$SUPERCRONIC-$TARGETARCH" /usr/local/bin/supercronic \
    && echo "$sum  /usr/local/bin/supercronic" | sha1sum --check - \
    && chmod 755 /usr/local/bin/supercronic

# ---- train -------------------------------------------------------------------------------------------------

FROM base-cpu AS train
ARG REVISION=unknown
LABEL org.opencontainers.image.title="bft-train" \
      org.opencontainers.image.description="Trains BFT recommenders and publishes their bundles" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=install-train /opt/bft /opt/bft
COPY --from=supercronic /usr/local/bin/supercronic /usr/local/bin/supercronic
# A new named volume takes its owner from this folder.
RUN install --directory --owner=10001 --group=10001 /var/lib/bft
ENV PATH=/opt/bft/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/bft
STOPSIGNAL SIGTERM
ENTRYPOINT ["bft-train"]
CMD ["--help"]

# ---- serve: the last stage, so what a plain `docker build .` makes -----------------------------------------

FROM base-${VARIANT} AS serve
ARG REVISION=unknown
LABEL org.opencontainers.image.title="bft-serve" \
      org.opencontainers.image.description="Ranked items with a calibrated confidence, from a BFT bundle" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=install-serve /opt/bft /opt/bft
RUN install --directory --owner=10001 --group=10001 /var/lib/bft
# Inside a container the listeners must be reached from outside it; which of them to publish is the
# deployment's choice: 8080 is the API, 9090 is for probes and metrics. The admin API (9091) stays on the
# container's loopback address; BFT_ADMIN_HOST=0.0.0.0 opens it, and needs BFT_ADMIN_KEY.
ENV PATH=/opt/bft/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    BFT_BUNDLE=/var/lib/bft/registry \
    BFT_HOST=0.0.0.0 \
    BFT_PORT=8080 \
    BFT_OPS_HOST=0.0.0.0 \
    BFT_OPS_PORT=9090
USER 10001:10001
WORKDIR /var/lib/bft
EXPOSE 8080 9090 9091
STOPSIGNAL SIGTERM
# http.client, because urllib would send this through a proxy named in the environment.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python3", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['BFT_OPS_PORT']), timeout=2); c.request('GET', '/livez'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["bft-serve"]
CMD ["run"]
