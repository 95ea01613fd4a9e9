//! Writing a safetensors header: lays out the tensors of a new file.
//!
//! The layout is that of the format's own writer (`prepare` in <https://github.com/huggingface/safetensors>,
//! safetensors/src/tensor.rs): tensors by descending alignment of their type, then by name, without gaps; the header is
//! padded with blanks to a multiple of eight bytes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::Dtype;
use crate::error::{Error, Result};
use crate::limits::SAFETENSORS_HEADER_MAX;

/// A tensor of a new file.
#[derive(Clone, Copy, Debug)]
pub struct NewTensor<'a> {
    /// Name.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: &'a Dtype,
    /// Shape.
    pub shape: &'a [u64],
    /// Bytes.
    pub len: u64,
}

/// Layout of a new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFile {
    /// Header.
    pub header: Vec<u8>,
    /// Start of each tensor in the file, in the order of the input.
    pub starts: Vec<u64>,
    /// Bytes in the file.
    pub len: u64,
}

/// Lays out a safetensors file with its `__metadata__`.
///
/// # Errors
/// Unsupported, if the format lacks a tensor's type, or does not allow as many tensors; usage, if two have the same name.
pub fn lay_out(tensors: &[NewTensor<'_>], metadata: &BTreeMap<String, String>) -> Result<NewFile> {
    let mut order: Vec<(usize, &NewTensor<'_>)> = tensors.iter().enumerate().collect();
    order.sort_by_key(|(_, tensor)| (Reverse(tensor.dtype), tensor.name));
    if let Some(wrong) = tensors.iter().find(|tensor| !tensor.dtype.in_safetensors() || tensor.name == "__metadata__") {
        return Err(Error::new(crate::ErrorKind::Unsupported, "safetensors cannot hold this tensor")
            .at(wrong.name)
            .got(format!("{} {:?}", wrong.dtype, wrong.shape))
            .help("name the other tensors, or restore the file that holds it as it is"));
    }
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|two| two[0] == two[1]) {
        return Err(Error::usage("a file cannot hold two tensors of one name").got(twice[0]));
    }
    let (mut json, mut end, mut starts) = (String::from("{"), 0_u64, vec![0; tensors.len()]);
    if !metadata.is_empty() {
        // Writing to a string cannot fail.
        let _ = write!(json, r#""__metadata__":{}"#, serde_json::json!(metadata));
    }
    let too_large = || Error::new(crate::ErrorKind::Unsupported, "safetensors cannot hold as much");
    for (number, (at, tensor)) in order.into_iter().enumerate() {
        let start = end;
        end = end.checked_add(tensor.len).ok_or_else(too_large)?;
        if let Some(place) = starts.get_mut(at) {
            *place = start;
        }
        let comma = if number == 0 && metadata.is_empty() { "" } else { "," };
        let (name, dtype) = (serde_json::Value::from(tensor.name), serde_json::Value::from(tensor.dtype.word()));
        let shape: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
        let shape = shape.join(",");
        // Writing to a string cannot fail.
        let _ = write!(json, r#"{comma}{name}:{{"dtype":{dtype},"shape":[{shape}],"data_offsets":[{start},{end}]}}"#);
    }
    json.push('}');
    let padded = json.len().next_multiple_of(8);
    json.extend(std::iter::repeat_n(' ', padded - json.len()));
    let json_len = json.len() as u64;
    let mut header = json_len.to_le_bytes().to_vec();
    header.extend(json.into_bytes());
    let header_len = header.len() as u64;
    let len = end.checked_add(header_len).filter(|_| json_len <= SAFETENSORS_HEADER_MAX).ok_or_else(too_large)?;
    starts.iter_mut().for_each(|start| *start += header_len);
    Ok(NewFile { header, starts, len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::checkpoint::{in_memory, parse_layout};

    fn tensor<'a>(name: &'a str, dtype: &'a Dtype, shape: &'a [u64]) -> NewTensor<'a> {
        NewTensor { name, dtype, shape, len: dtype.tensor_len(shape).unwrap() }
    }

    #[test]
    fn files_are_laid_out_as_safetensors_does() {
        let tensors = [
            tensor("b\"", &Dtype::F32, &[2, 3]),
            tensor("a", &Dtype::F32, &[]),
            tensor("z", &Dtype::I64, &[1]),
            tensor("e", &Dtype::Bool, &[0]),
        ];
        let file = lay_out(&tensors, &BTreeMap::new()).unwrap();
        let json = r#"{"z":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[],"data_offsets":[8,12]},"b\"":{"dtype":"F32","shape":[2,3],"data_offsets":[12,36]},"e":{"dtype":"BOOL","shape":[0],"data_offsets":[36,36]}}"#;
        let text = String::from_utf8(file.header[8..].to_vec()).unwrap();
        assert_eq!(text.trim_end(), json);
        assert!(text.len().is_multiple_of(8) && text.len() - json.len() < 8);
        let start = file.header.len() as u64;
        assert_eq!((file.starts, file.len), (vec![start + 12, start + 8, start, start + 36], start + 36));
        let whole = [file.header, vec![0; 36]].concat();
        let layout = parse_layout(&mut in_memory(&whole), whole.len() as u64, &mut |_| true).unwrap().unwrap();
        assert_eq!(layout.tensors.len(), 4);
    }

    #[test]
    fn words_come_first() {
        let words = BTreeMap::from([("format".to_owned(), "pt".to_owned()), ("q".to_owned(), "\"\n".to_owned())]);
        let file = lay_out(&[tensor("a", &Dtype::U8, &[1])], &words).unwrap();
        let json = r#"{"__metadata__":{"format":"pt","q":"\"\n"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        assert_eq!(String::from_utf8_lossy(&file.header[8..]).trim_end(), json);
        let whole = [file.header, vec![0]].concat();
        assert_eq!(
            parse_layout(&mut in_memory(&whole), whole.len() as u64, &mut |_| true).unwrap().unwrap().tensors.len(),
            1
        );
    }

    #[test]
    fn nothing_is_a_file_too() {
        let file = lay_out(&[], &BTreeMap::new()).unwrap();
        assert_eq!((&file.header[8..], file.len), (&b"{}      "[..], 16));
    }

    #[test]
    fn what_the_format_cannot_hold_is_refused() {
        for (tensors, kind) in [
            (vec![tensor("a", &Dtype::C128, &[1])], ErrorKind::Unsupported),
            (vec![tensor("__metadata__", &Dtype::F32, &[1])], ErrorKind::Unsupported),
            (vec![tensor("a", &Dtype::F32, &[1]), tensor("a", &Dtype::F16, &[1])], ErrorKind::Usage),
            (vec![NewTensor { len: u64::MAX, ..tensor("a", &Dtype::U8, &[1]) }], ErrorKind::Unsupported),
        ] {
            assert_eq!(lay_out(&tensors, &BTreeMap::new()).unwrap_err().kind(), kind, "{tensors:?}");
        }
    }
}
