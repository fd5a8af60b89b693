//! `blockd pool map`.

use std::path::PathBuf;

use blockd_api::v1::{self, ExtentKind, GetPoolRequest, PoolExtentsRequest, PoolExtentsResponse};
use blockd_media::error::Error;
use serde::Serialize;

use super::super::map::{self, Device, Picture, Run, Use};
use super::super::{Context, answers};
use super::device_name;

/// Draw what the extents of a pool are used for
///
/// Each character stands for some extents, of which it shows the most frequent use: '#' is
/// metadata, each volume has a letter, '=' is shared, '-' granted and not written yet, '.' free. A
/// small letter says that some of the extents are free.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool map\n  blockd pool map default --svg pool.svg")]
pub(crate) struct Map {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Write an SVG image to this file instead; "-" is standard output
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Characters or squares in a line [default: as wide as the terminal, else 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub width: Option<u16>,
}

/// The output of `pool map --json`.
#[derive(Debug, Serialize)]
pub(super) struct Mapped {
    pool: String,
    extent_size: u64,
    runs: Vec<RunShape>,
}

#[derive(Debug, Serialize)]
struct RunShape {
    device: usize,
    first: u64,
    count: u64,
    kind: &'static str,
    volume: Option<String>,
}

impl Map {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let mut client = context.client().await?;
        let request = GetPoolRequest { name: self.pool };
        let pool = answers::pool(client.get_pool(request).await?.pool)?;
        let request = PoolExtentsRequest { pool: pool.name.clone() };
        let parts = client.pool_extents(request).await?;
        let picture = picture(&pool, &parts);
        if let Some(path) = &self.svg {
            let text = map::svg::draw(&picture, u64::from(self.width.unwrap_or(96)));
            if path.as_os_str() == "-" {
                return context.output.text(&text);
            }
            let written = std::fs::write(path, text);
            return written.map_err(|source| Error::file("write", path, source));
        }
        let shape = runs_shape(&picture);
        let width = self.width.map(usize::from);
        context.output.either(&shape, || map::text::draw(&picture, width, &context.output))
    }
}

/// The daemon's runs in the order of the devices. Volumes get their letters in the order of the
/// places where they begin, so that the picture reads from A on.
pub(super) fn picture(pool: &v1::Pool, parts: &[PoolExtentsResponse]) -> Picture {
    let extent_bytes = parts.first().map_or(pool.extent_size, |part| part.extent_size);
    let mut devices: Vec<Device> = pool
        .devices
        .iter()
        .map(|device| Device { path: device_name(device).to_owned(), runs: Vec::new() })
        .collect();
    let mut volumes: Vec<String> = Vec::new();
    for run in parts.iter().flat_map(|part| &part.runs) {
        let what = match run.kind() {
            ExtentKind::Metadata => Use::Metadata,
            ExtentKind::Shared => Use::Shared,
            ExtentKind::Reserved => Use::Reserved,
            ExtentKind::Free | ExtentKind::Unspecified => Use::Free,
            ExtentKind::Mapped => {
                let known = volumes.iter().position(|name| *name == run.volume);
                Use::Volume(known.unwrap_or_else(|| {
                    volumes.push(run.volume.clone());
                    volumes.len() - 1
                }))
            }
        };
        let index = usize::try_from(run.device).unwrap_or(usize::MAX);
        if let Some(device) = devices.get_mut(index) {
            device.runs.push(Run { first: run.first_index, count: run.count, what });
        }
    }
    Picture { pool: pool.name.clone(), extent_bytes: u64::from(extent_bytes), devices, volumes }
}

pub(super) fn runs_shape(picture: &Picture) -> Mapped {
    let mut runs = Vec::new();
    for (index, device) in picture.devices.iter().enumerate() {
        for run in &device.runs {
            let (kind, volume) = match run.what {
                Use::Metadata => ("metadata", None),
                Use::Volume(volume) => ("mapped", picture.volumes.get(volume).cloned()),
                Use::Shared => ("shared", None),
                Use::Reserved => ("reserved", None),
                Use::Free => ("free", None),
            };
            runs.push(RunShape { device: index, first: run.first, count: run.count, kind, volume });
        }
    }
    Mapped { pool: picture.pool.clone(), extent_size: picture.extent_bytes, runs }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(runs: &[(u32, u64, u64, ExtentKind, &str)]) -> PoolExtentsResponse {
        let run =
            |&(device, first_index, count, kind, volume): &(u32, u64, u64, ExtentKind, &str)| {
                v1::ExtentRun {
                    device,
                    first_index,
                    count,
                    kind: kind.into(),
                    volume: volume.to_owned(),
                }
            };
        PoolExtentsResponse {
            extent_size: 1 << 18,
            total_count: 20,
            runs: runs.iter().map(run).collect(),
        }
    }

    #[test]
    fn runs_of_several_messages_become_one_picture() {
        let pool = v1::Pool {
            name: "two".to_owned(),
            devices: vec![v1::Device::default(), v1::Device::default()],
            ..Default::default()
        };
        let parts = [
            part(&[(0, 0, 2, ExtentKind::Metadata, ""), (0, 2, 8, ExtentKind::Mapped, "b")]),
            part(&[(1, 0, 4, ExtentKind::Mapped, "a"), (1, 4, 6, ExtentKind::Free, "")]),
        ];
        let picture = picture(&pool, &parts);
        assert_eq!(picture.volumes, ["b", "a"]);
        assert_eq!(picture.total_count(), 20);
        assert_eq!(picture.devices[1].runs[0].what, Use::Volume(1));
        let text = serde_json::to_string(&runs_shape(&picture)).unwrap();
        let expected = concat!(
            r#"{"pool":"two","extent_size":262144,"runs":["#,
            r#"{"device":0,"first":0,"count":2,"kind":"metadata","volume":null},"#,
            r#"{"device":0,"first":2,"count":8,"kind":"mapped","volume":"b"},"#,
            r#"{"device":1,"first":0,"count":4,"kind":"mapped","volume":"a"},"#,
            r#"{"device":1,"first":4,"count":6,"kind":"free","volume":null}]}"#,
        );
        assert_eq!(text, expected);
    }
}
