//! Tests of the node part in a world of memory.

mod conditions;
mod encryption;
mod interruptions;
mod pmem;
mod rules;

use std::path::Path;

use tonic::Code;

use super::content::Making;
use super::encryption::Keys;
use super::flags::Options;
use super::look::{self, Stats};
use super::modes::{Access, Target};
use super::publish;
use super::records::Place;
use super::stage;
use super::steps::FileSystemSpec;
use super::testing::{Fake, Held};
use super::world::{Result, Volumes as _, Wanted};
use crate::capability::Mode;
use crate::pmem::Plan;

const ID: &str = "default/csi.a";
const STAGING: &str = "/kubelet/staging/a";
const SIZE: i64 = 1_073_741_824;

fn spec(file_system: &str) -> FileSystemSpec {
    let options = Options::parse(&["noatime".to_owned()]).unwrap();
    let making = Making::default();
    FileSystemSpec { file_system: file_system.to_owned(), options, hash: 7, making, dax: false }
}

fn keys(secrets: &[(&str, &str)]) -> Keys {
    let pair = |(name, key): &(&str, &str)| ((*name).to_owned(), (*key).to_owned());
    Keys::take(&mut secrets.iter().map(pair).collect()).unwrap().unwrap()
}

fn wanted(size_bytes: i64) -> Wanted {
    Wanted { size_bytes, class: "default".to_owned(), pmem: Plan::default() }
}

fn target(path: &str, mode: Mode, access: Access) -> Target {
    Target { path: path.into(), mode, read_only: false, access }
}

struct Node {
    world: Fake,
    place: Place,
}

fn node(held: Held) -> Node {
    let world = Fake::default();
    let place = world.add("csi.a", SIZE, held);
    Node { world, place }
}

fn file_system(kind: &str) -> Held {
    Held::FileSystem { kind: kind.to_owned(), bytes: SIZE, dirty: false, data: true }
}

impl Node {
    fn stage(&self, mode: Mode, file_system: &str) -> Result<()> {
        self.stage_at(STAGING, mode, Some(file_system))
    }

    fn stage_at(&self, path: &str, mode: Mode, file_system: Option<&str>) -> Result<()> {
        let spec = file_system.map(spec);
        let request = stage::Request {
            volume: ID,
            place: &self.place,
            path: Path::new(path),
            mode,
            spec: spec.as_ref(),
        };
        stage::stage(&self.world.as_world(), &request)
    }

    fn publish(&self, target: &Target) -> Result<()> {
        self.publish_strictly(target, false)
    }

    fn publish_strictly(&self, target: &Target, strict: bool) -> Result<()> {
        let staging = Path::new(STAGING);
        let request = publish::Request { volume: ID, place: &self.place, staging, target, strict };
        publish::publish(&self.world.as_world(), &request)
    }

    fn unpublish(&self, path: &str) -> Result<()> {
        publish::unpublish(&self.world.as_world(), ID, &self.place, Path::new(path))
    }

    fn stats(&self, path: &str) -> Result<Stats> {
        let volume = self.world.get(&self.place)?;
        look::stats(&self.world.as_world(), ID, &self.place, Path::new(path), volume.as_ref())
    }

    fn unstage(&self) -> Result<()> {
        stage::unstage(&self.world.as_world(), ID, &self.place, Path::new(STAGING))
    }
}

fn code(result: Result<()>) -> Code {
    result.expect_err("should be refused").code()
}

fn mount(path: &str) -> Target {
    target(path, Mode::MultiWriter, Access::Mount)
}
