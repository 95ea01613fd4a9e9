//! Any bytes: see [`towline_fuzz::pickle`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::pickle(bytes));
