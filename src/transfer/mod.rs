//! Agent to agent: who they are ([`identity`]), how they talk ([`protocol`]), what carries it ([`quic`], [`tcp`]; [`local`] between the
//! processes of a node), how one asks another to do something ([`calls`]), which of them there are ([`peers`]), and who gives what to
//! whom ([`exchange`]).

mod asking;
pub mod calls;
mod carrier;
mod drive;
pub mod exchange;
mod gate;
mod guarded;
mod holdings;
pub mod identity;
pub mod ledger;
pub mod local;
pub mod peers;
pub mod protocol;
pub mod quic;
mod seldom;
pub mod tcp;
mod wire;

pub use self::carrier::Dial;
pub(crate) use self::carrier::{GOOD_WINDOW, not_bound};
pub use self::drive::{Client, Fetching, Received, Reply};
pub use self::gate::{Admission, Gate, GateStat, Pass};
pub use self::holdings::{Ahead, Holdings, Seat};
pub use self::wire::Wire;
