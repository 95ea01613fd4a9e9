//! placeholder

/// cut
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Cut {
    /// t
    Tensor = 1,
    /// c
    Content = 2,
    /// f
    Fixed = 3,
}
impl Cut {
    /// x
    pub fn from_u8(b: u8) -> Option<Self> {
        match b { 1 => Some(Self::Tensor), 2 => Some(Self::Content), 3 => Some(Self::Fixed), _ => None }
    }
}
