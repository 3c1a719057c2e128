# Tidemill with Ray for Kubernetes (docs/clusters/kubernetes.md), without models. `make image` builds it.
#
# BASE     an image with Python 3.11 and pip, in which the packages are copied to /usr/local
# BUILDER  the same with a C compiler
# VARIANT  cpu or cuda: locks/image-VARIANT.txt has the exact version of every package
# PIP_*    pip's own variables, for packages that do not come from its usual index
ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG BUILDER=docker.io/library/python:3.11-bookworm

FROM ${BUILDER} AS builder
ARG VARIANT=cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
# PIP_NO_BUILD_ISOLATION: 0 switches isolation off. Packages are built with the tools of the lock.
ENV PIP_NO_CACHE_DIR=1 PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=0 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY locks/default.txt locks/image-${VARIANT}.txt ./
RUN grep -E '^(hatchling|packaging|pathspec|pluggy|setuptools|trove-classifiers)==' default.txt > tools.txt \
    && python -m pip install --requirement tools.txt
# The largest packages change least, and get a layer of their own.
RUN large='^(numpy|pyarrow|ray|torch|triton|cuda-|nvidia-)' \
    && grep -E "$large" image-${VARIANT}.txt > large.txt \
    && grep -vE "$large" image-${VARIANT}.txt > packages.txt
RUN python -m pip install --ignore-installed --prefix /large --requirement large.txt
RUN python -m pip install --ignore-installed --prefix /packages --requirement packages.txt
COPY . source
RUN python -m pip install --ignore-installed --prefix /tidemill ./source

FROM ${BASE}
ARG VARIANT=cpu
# Triton, which computes attention on a GPU, compiles with it at first use.
RUN if [ "${VARIANT}" = cuda ]; then \
      apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# The packages below have another setuptools, which must not mix with that of the base.
RUN python -m pip uninstall --yes setuptools wheel \
    && useradd --uid 1000 --user-group --create-home --no-log-init --shell /bin/bash tidemill
COPY --from=builder /large /usr/local
COPY --from=builder /packages /usr/local
COPY --from=builder /tidemill /usr/local
# GKE mounts the GPU's driver in /usr/local/nvidia; elsewhere NVIDIA's container runtime reads its two variables.
ENV PATH=${PATH}:/usr/local/nvidia/bin \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /home/tidemill
CMD ["tidemill", "--help"]
