//! Agent to agent: who they are ([`identity`]), how they talk ([`protocol`]), and what carries it ([`quic`], [`tcp`]).

mod carrier;
mod drive;
mod holdings;
pub mod identity;
pub mod protocol;
pub mod quic;
pub mod tcp;

pub use self::carrier::Dial;
pub use self::drive::{Client, Fetching, Received, Reply};
pub use self::holdings::Holdings;
