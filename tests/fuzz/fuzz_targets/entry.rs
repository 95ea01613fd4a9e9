//! Any bytes: see [`towline_fuzz::entry`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::entry(bytes));
