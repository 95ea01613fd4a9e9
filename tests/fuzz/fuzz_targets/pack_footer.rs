//! Any bytes: see [`towline_fuzz::pack_footer`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::pack_footer(bytes));
