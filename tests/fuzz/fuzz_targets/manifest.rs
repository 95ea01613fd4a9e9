//! Any bytes: see [`towline_fuzz::manifest`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::manifest(bytes));
