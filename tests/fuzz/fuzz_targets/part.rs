//! Any bytes: see [`towline_fuzz::part`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::part(bytes));
