"""Packaging of pure_backend: ranges are here, the exact versions it is tested with in `requirements/`."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="pure_backend",
    version="0.1.0",
    description="A torch.compile backend that turns pure FX graphs into cached JAX functions.",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    author="The pure_backend authors",
    keywords=["pytorch", "torch.compile", "jax", "xla", "tpu", "pallas", "compiler"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Compilers",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["pure_backend*"]),
    install_requires=[
        "torch>=2.9,<2.14",
        "jax>=0.8.2,<0.11",
        "jaxlib>=0.8.2,<0.11",  # before, XLA:CPU keeps weights of products by address: see `_compat.check_cpu_client`
        "torchax>=0.0.13,<0.1",
        "platformdirs>=4",
        "rich>=13",
    ],
    extras_require={
        "xla": ["torch_xla>=2.9,<2.10"],
        "tpu": ["libtpu>=0.0.42"],
        "test": [
            "expecttest",
            "hypothesis",
            "psutil",
            "pyright",
            "pytest>=9",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
        ],
        "zoo": ["accelerate", "diffusers", "lightning", "peft", "timm", "torchao", "torchvision", "transformers>=5"],
    },
    entry_points={"torch_dynamo_backends": ["assume_pure = pure_backend.backend:assume_pure"]},
)
