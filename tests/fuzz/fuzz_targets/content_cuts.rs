//! Any bytes, read in windows of any one length: the candidates of one pass.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towline::chunker::content::{LOOKBACK, candidates};

fuzz_target!(|input: (u16, &[u8])| {
    let (window_len, bytes) = (usize::from(input.0).max(1), input.1);
    let (mut whole, mut parts, mut found) = (Vec::new(), Vec::new(), Vec::new());
    candidates(&[], bytes, &mut whole);
    for start in (0..bytes.len()).step_by(window_len) {
        let window = &bytes[start..bytes.len().min(start + window_len)];
        found.clear();
        candidates(&bytes[start.saturating_sub(LOOKBACK)..start], window, &mut found);
        parts.extend(found.iter().map(|at| at + start as u32));
    }
    assert_eq!(parts, whole);
});
