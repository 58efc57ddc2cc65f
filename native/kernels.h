// The functions that Python calls, each once per instruction set: `linear_forward_avx2`, for instance.
#pragma once

#include "arguments.h"

#define JOINED(name, suffix) name##_##suffix
#define NAMED_AFTER(name, isa) JOINED(name, isa)
#define EXPORTED(name) NAMED_AFTER(name, UNROLLED_ISA)

extern "C" {
#pragma GCC visibility push(default)
Status EXPORTED(linear_forward)(const Linear*, const LinearOutputs*);
Status EXPORTED(linear_backward)(const Linear*, const LinearGradients*);
int64_t EXPORTED(linear_saved_floats)(const Linear*);
Status EXPORTED(key_peaks)(const Linear*, const KeyPeaks*);
Status EXPORTED(gla_forward)(const Gla*, const GlaOutputs*);
Status EXPORTED(gla_backward)(const Gla*, const GlaGradients*);
Status EXPORTED(dplr_forward)(const Dplr*, const GlaOutputs*);
Status EXPORTED(dplr_backward)(const Dplr*, const DplrGradients*);
Status EXPORTED(selective_scan_forward)(const SelectiveScan*, const SelectiveScanOutputs*);
Status EXPORTED(selective_scan_backward)(const SelectiveScan*, const SelectiveScanGradients*);
Status EXPORTED(selective_scan_step)(const SelectiveScan*, const SelectiveScanOutputs*);
Status EXPORTED(mixtures)(const Mixtures*);
Status EXPORTED(mixtures_backward)(const Mixtures*, const MixturesGradients*);
Status EXPORTED(wkv_forward)(const Wkv*, const WkvOutputs*);
Status EXPORTED(wkv_backward)(const Wkv*, const WkvGradients*);
Status EXPORTED(linear_step)(const LinearStep*);
Status EXPORTED(window_forward)(const Window*, const WindowOutputs*);
Status EXPORTED(window_backward)(const Window*, const WindowGradients*);
Status EXPORTED(conv_forward)(const Conv*, const ConvOutputs*);
Status EXPORTED(conv_backward)(const Conv*, const ConvGradients*);
Status EXPORTED(rotary)(const Rotary*);
Status EXPORTED(head_scale)(const HeadScale*, const HeadScaleOutputs*);
Status EXPORTED(head_scale_backward)(const HeadScale*, const HeadScaleGradients*);
Status EXPORTED(dense)(const Dense*);
Status EXPORTED(decode)(const Program*, const Tokens*);
Status EXPORTED(decode_on)(const Program*, const Continuation*);
double EXPORTED(fma_peak)(double seconds);
#pragma GCC visibility pop
}
