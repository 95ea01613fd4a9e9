//! Any bytes: see [`towline_fuzz::codec_decode`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| towline_fuzz::codec_decode(bytes));
