//! Any bytes: see [`towline_fuzz::wire`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::wire(bytes));
