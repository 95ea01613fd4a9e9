//! Any bytes: see [`towline_fuzz::torch_file`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::torch_file(bytes));
