//! Any bytes: see [`towline_fuzz::envelope`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::envelope(bytes));
