//! The devices that the extents of a volume come from, as a class or a parameter names them.

use std::fmt::Display;

use blockd_api::v1;

use crate::error::Error;
use crate::limits::MAX_STRING;

/// The devices of a pool that a volume's extents come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Placement {
    /// One device after the other.
    Fill,
    /// All devices in turn.
    Spread,
    /// The device with this path, while it has space.
    Pin(String),
}

impl Placement {
    /// Reads `fill`, `spread` or `pin:PATH`. `field` is what the error names.
    ///
    /// # Errors
    /// The text is none of them.
    pub fn parse(field: impl Display, text: &str) -> Result<Self, Error> {
        match (text, text.strip_prefix("pin:")) {
            ("fill", _) => Ok(Self::Fill),
            ("spread", _) => Ok(Self::Spread),
            (_, Some(path)) if path.starts_with('/') && path.len() <= MAX_STRING => {
                Ok(Self::Pin(path.to_owned()))
            }
            _ => {
                let allowed = "fill, spread, or pin: and the absolute path of a device of the pool";
                Err(Error::invalid(field, text, allowed))
            }
        }
    }

    /// Has a request to the daemon set it.
    pub fn apply(&self, request: &mut v1::ConfigureVolumeRequest) {
        let (placement, path) = match self {
            Self::Fill => (v1::Placement::Fill, ""),
            Self::Spread => (v1::Placement::Spread, ""),
            Self::Pin(path) => (v1::Placement::Pin, path.as_str()),
        };
        request.placement = placement.into();
        path.clone_into(&mut request.pin_to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_are_read_and_asked_for() {
        let asked = |text| {
            let mut request = v1::ConfigureVolumeRequest::default();
            Placement::parse("a", text).unwrap().apply(&mut request);
            (request.placement(), request.pin_to)
        };
        assert_eq!(asked("fill"), (v1::Placement::Fill, String::new()));
        assert_eq!(asked("spread"), (v1::Placement::Spread, String::new()));
        assert_eq!(asked("pin:/dev/sdc"), (v1::Placement::Pin, "/dev/sdc".to_owned()));
        for bad in ["", "Spread", "pin", "pin:", "pin:sdc", "stripe"] {
            let text = Placement::parse("class a: placement", bad).unwrap_err().to_string();
            assert!(text.starts_with("class a: placement is "), "{text}");
            assert!(text.contains("fill, spread, or pin:"), "{text}");
        }
    }
}
