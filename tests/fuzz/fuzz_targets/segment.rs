//! Any bytes: see [`towline_fuzz::segment`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::segment(bytes));
