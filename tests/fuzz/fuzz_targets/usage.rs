//! Any bytes: see [`towline_fuzz::usage`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::usage(bytes));
