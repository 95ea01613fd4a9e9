//! Any bytes: see [`towline_fuzz::message`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::message(bytes));
