//! Any bytes: see [`towline_fuzz::map`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::map(bytes));
