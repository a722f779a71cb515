// All families of ops, for code that handles every op of PARE_OPS.  Other code includes the
// families that it calls.
#pragma once
#include "ops/attention.h"
#include "ops/blocks.h"
#include "ops/compression.h"
#include "ops/data.h"
#include "ops/linear.h"
#include "ops/logits.h"
#include "ops/merge.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/paged.h"
#include "ops/rope.h"
#include "ops/swiglu.h"
