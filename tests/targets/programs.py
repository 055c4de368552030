"""Small programs as XLA writes them after scheduling; every number in the tests is worked out by hand from them."""

LOOP = """
HloModule jit_step, is_scheduled=true

%cut (p: f32[4,8,16], i: s32[]) -> bf16[8,16] {
  %p = f32[4,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,8,16]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}
  %flat = f32[8,16]{1,0} bitcast(%row)
  ROOT %rounded = bf16[8,16]{1,0} convert(%flat)
}

%keep (p.1: f32[4,8,32], x: f32[8,32], i.1: s32[]) -> f32[4,8,32] {
  %p.1 = f32[4,8,32]{2,1,0} parameter(0)
  %x = f32[8,32]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %one = f32[1,8,32]{2,1,0} bitcast(%x)
  ROOT %kept = f32[4,8,32]{2,1,0} dynamic-update-slice(%p.1, %one, %i.1)
}

%body (state: (s32[], f32[4,8,16], f32[4,8,32])) -> (s32[], f32[4,8,16], f32[4,8,32]) {
  %state = (s32[], f32[4,8,16]{2,1,0}, /*index=2*/f32[4,8,32]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %stacked = f32[4,8,16]{2,1,0} get-tuple-element(%state), index=1
  %saved = f32[4,8,32]{2,1,0} get-tuple-element(%state), index=2
  %a = bf16[8,16]{1,0} fusion(%stacked, %n), kind=kLoop, calls=%cut, metadata={op_name="jit(step)/a)b (c"}
  %w = bf16[16,32]{1,0} constant({...})
  %y = (f32[8,32]{1,0}, s8[4096]{0}) custom-call(%a, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"]}}}
  %y0 = f32[8,32]{1,0} get-tuple-element(%y), index=0
  %new = f32[4,8,32]{2,1,0} fusion(%saved, %y0, %n), kind=kLoop, calls=%keep
  ROOT %next = (s32[], f32[4,8,16]{2,1,0}, f32[4,8,32]{2,1,0}) tuple(%n, %stacked, %new)
}

%condition (state.1: (s32[], f32[4,8,16], f32[4,8,32])) -> pred[] {
  %state.1 = (s32[], f32[4,8,16]{2,1,0}, f32[4,8,32]{2,1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (arg: f32[4,8,16]) -> f32[4,8,32] {
  %arg = f32[4,8,16]{2,1,0} parameter(0)
  %start = s32[] constant(0)
  %empty = f32[4,8,32]{2,1,0} constant({...})
  %begin = (s32[], f32[4,8,16]{2,1,0}, f32[4,8,32]{2,1,0}) tuple(%start, %arg, %empty)
  %loop = (s32[], f32[4,8,16]{2,1,0}, f32[4,8,32]{2,1,0}) while(%begin), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  %result = f32[4,8,32]{2,1,0} get-tuple-element(%loop), index=2
  ROOT %sum = f32[4,8,32]{2,1,0} add(%result, %result)
}
"""

# A gather of 1,024 bytes to 8,192 whose links work while a copy runs, and a sum that nothing covers.
TRANSFERS = """
HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[256], q: f32[SIZE]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %q = f32[SIZE]{0} parameter(1)
  %gather = (f32[256]{0}, f32[2048]{0}) all-gather-start(%p), replica_groups=GROUPS, dimensions={0}
  %copied = f32[SIZE]{0} copy(%q)
  %gathered = f32[2048]{0} all-gather-done(%gather)
  %sum = f32[256]{0} all-reduce-start(%p), replica_groups=GROUPS, to_apply=%add
  %summed = f32[256]{0} all-reduce-done(%sum)
  %moved = f32[256]{0} collective-permute(%summed), source_target_pairs={{0,7},{7,0}}
  ROOT %both = f32[256]{0} bitcast(%moved)
}
"""
