//! Any bytes: see [`towline_fuzz::tombstone`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::tombstone(bytes));
