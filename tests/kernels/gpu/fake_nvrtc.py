"""A library with NVRTC's interface, for machines without one: a cubin of its making is the source itself."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from ingot.kernels.gpu.nvrtc import Nvrtc

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { char* source; char log[256]; } Program;
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 7; return 0; }
const char* nvrtcGetErrorString(int result) { return result == 3 ? "INVALID_INPUT" : "FAILED"; }
int nvrtcCreateProgram(Program** made, const char* source, const char* name, int n, void* a, void* b) {
  if (!*source) return 3;
  *made = calloc(1, sizeof(Program));
  (*made)->source = strdup(source);
  return 0;
}
int nvrtcCompileProgram(Program* it, int n, const char** options) {
  int targeted = 0;
  for (int i = 0; i < n; ++i) targeted |= !strncmp(options[i], "--gpu-architecture=sm_", 22);
  if (targeted && !strstr(it->source, "#error")) return 0;
  strcpy(it->log, "kernel.cu(7): error: it was\n  to fail");
  return 6;
}
int nvrtcGetCUBINSize(Program* it, size_t* size) { *size = strlen(it->source); return 0; }
int nvrtcGetCUBIN(Program* it, char* to) { memcpy(to, it->source, strlen(it->source)); return 0; }
int nvrtcGetProgramLogSize(Program* it, size_t* size) { *size = strlen(it->log) + 1; return 0; }
int nvrtcGetProgramLog(Program* it, char* to) { strcpy(to, it->log); return 0; }
int nvrtcDestroyProgram(Program** it) { free((*it)->source); free(*it); *it = 0; return 0; }
"""
COMPILER = shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs gcc")


@cache
def library(folder: Path) -> ctypes.CDLL:
    source, made = folder / "nvrtc.c", folder / "libnvrtc.so.13"
    source.write_text(SOURCE)
    subprocess.run([str(COMPILER), "-w", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return ctypes.CDLL(str(made))


def fake_nvrtc(folder: Path) -> Nvrtc:
    return Nvrtc(library(folder), folder, "a fake")
