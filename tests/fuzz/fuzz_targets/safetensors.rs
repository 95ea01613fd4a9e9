//! Any bytes as a safetensors header: no panic, and a layout only if cutting by it covers the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towline::checkpoint::safetensors;
use towline::chunker::tensor;

fuzz_target!(|input: (u32, &[u8])| {
    let (file_len, header) = (u64::from(input.0), input.1);
    let (parsed, peak) = towline_fuzz::memory::peak_of(|| safetensors::parse(header, file_len));
    assert!(peak <= 256 * header.len() + (64 << 10), "{peak} bytes of memory for a header of {}", header.len());
    let Ok(layout) = parsed else { return };
    let mut end = 8;
    for tensor in &layout.tensors {
        assert!(end <= tensor.start && tensor.start <= tensor.end && tensor.end <= file_len);
        end = tensor.end;
    }
    let mut at = 0;
    for cut in tensor::cuts(&layout.spans(), file_len) {
        assert!(at < cut && cut - at <= tensor::PIECE_LEN_MAX);
        at = cut;
    }
    assert_eq!(at, file_len);
});
