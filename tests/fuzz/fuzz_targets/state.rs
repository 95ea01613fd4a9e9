//! Any bytes: see [`towline_fuzz::state`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::state(bytes));
