//! Any bytes: see [`towline_fuzz::inventory`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::inventory(bytes));
