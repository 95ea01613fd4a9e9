//! Any bytes: see [`towline_fuzz::dcp_metadata`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::dcp_metadata(bytes));
