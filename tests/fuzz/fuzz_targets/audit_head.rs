//! Any bytes: see [`towline_fuzz::audit_head`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::audit_head(bytes));
