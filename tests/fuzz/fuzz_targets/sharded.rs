//! Any bytes: see [`towline_fuzz::sharded_index`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::sharded_index(bytes));
