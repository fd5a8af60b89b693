//! The two kinds of pools behind one set of calls: those whose volumes are extents, and those whose
//! volumes are namespaces of persistent memory.

use blockd_api::v1::{
    AddVolumeRequest, AddVolumeResponse, AttachVolumeRequest, AttachVolumeResponse,
    CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest, DeleteVolumeResponse,
    DetachVolumeRequest, DetachVolumeResponse, GetVolumeRequest, HealthRequest, HealthResponse,
    ListVolumesRequest, ListVolumesResponse, Pool, ResizeVolumeRequest, ResizeVolumeResponse,
    Volume,
};
use blockd_media::error::{Error, shown};
use blockd_media::units::{from_wire, to_wire, to_wire_gb};

use super::Control;
use super::messages::{count, size_of_request, wish};

type Result<T> = std::result::Result<T, Error>;

/// The calls that depend on what a pool's volumes are. A pool without a name is the default pool,
/// or where a call is for all pools, each pool of this kind.
#[tonic::async_trait]
pub(super) trait PoolKind: Send + Sync {
    async fn describe(&self, pool: &str) -> Result<Pool>;
    /// Opens a pool that is not open. False if it is open.
    async fn reopen(&self, pool: &str) -> Result<bool>;
    async fn create_volume(&self, asked: CreateVolumeRequest) -> Result<CreateVolumeResponse>;
    async fn add_volume(&self, asked: AddVolumeRequest) -> Result<AddVolumeResponse>;
    async fn delete_volume(&self, asked: DeleteVolumeRequest) -> Result<DeleteVolumeResponse>;
    async fn get_volume(&self, asked: GetVolumeRequest) -> Result<Volume>;
    async fn list_volumes(&self, asked: &ListVolumesRequest) -> Result<ListVolumesResponse>;
    async fn resize_volume(&self, asked: ResizeVolumeRequest) -> Result<ResizeVolumeResponse>;
    async fn attach_volume(&self, asked: AttachVolumeRequest) -> Result<AttachVolumeResponse>;
    async fn detach_volume(&self, asked: DetachVolumeRequest) -> Result<DetachVolumeResponse>;
    async fn health(&self, asked: &HealthRequest) -> Result<HealthResponse>;
}

/// Pools that give extents to volumes, by a map.
struct Extents(Control);

/// Pools whose volumes are namespaces, with devices of the kernel's own.
struct Namespaces(Control);

impl Control {
    /// The kind of the pool of that name. A name that no pool has is one of a pool of extents.
    pub(super) fn kind(&self, pool: &str) -> Box<dyn PoolKind> {
        let [extents, namespaces] = self.kinds();
        if self.is_direct(pool) { namespaces } else { extents }
    }

    /// Both kinds.
    pub(super) fn kinds(&self) -> [Box<dyn PoolKind>; 2] {
        [Box::new(Extents(self.clone())), Box::new(Namespaces(self.clone()))]
    }
}

#[tonic::async_trait]
impl PoolKind for Extents {
    async fn describe(&self, pool: &str) -> Result<Pool> {
        self.0.describe_pool(&self.0.known(pool)?).await
    }

    async fn reopen(&self, pool: &str) -> Result<bool> {
        self.0.reopen_extents(pool).await
    }

    async fn create_volume(&self, asked: CreateVolumeRequest) -> Result<CreateVolumeResponse> {
        let (size, block_size) = self.0.checked_create(&asked)?;
        let limit = from_wire(asked.limit_bytes, 0)?;
        let made = self.0.create_volume(&asked.pool, &asked.name, size, limit, block_size);
        let (changed, volume) = made.await?;
        Ok(CreateVolumeResponse { changed, volume: Some(volume) })
    }

    async fn add_volume(&self, asked: AddVolumeRequest) -> Result<AddVolumeResponse> {
        self.0.add_volume(&asked).await
    }

    async fn delete_volume(&self, asked: DeleteVolumeRequest) -> Result<DeleteVolumeResponse> {
        self.0.delete_volume(&asked).await
    }

    async fn get_volume(&self, asked: GetVolumeRequest) -> Result<Volume> {
        self.0.get_volume(&asked.pool, &asked.name).await
    }

    async fn list_volumes(&self, asked: &ListVolumesRequest) -> Result<ListVolumesResponse> {
        let volumes = self.0.list_volumes(&asked.pool, asked.brief).await?;
        let releasing = self.0.releases(&self.0.serving(&asked.pool)?).await;
        Ok(ListVolumesResponse { volumes, releasing })
    }

    #[expect(deprecated, reason = "older clients send size_gb")]
    async fn resize_volume(&self, asked: ResizeVolumeRequest) -> Result<ResizeVolumeResponse> {
        let size = size_of_request(asked.size_bytes, asked.size_gb)?;
        self.0.resize_volume(&asked.pool, &asked.name, size, asked.shrink).await
    }

    async fn attach_volume(&self, asked: AttachVolumeRequest) -> Result<AttachVolumeResponse> {
        let attached = self.0.attach_volume(&asked.pool, &asked.name, wish(&asked));
        let (changed, volume) = attached.await?;
        Ok(AttachVolumeResponse { changed, volume: Some(volume) })
    }

    async fn detach_volume(&self, asked: DetachVolumeRequest) -> Result<DetachVolumeResponse> {
        let detached = self.0.detach_volume(&asked.pool, &asked.name, asked.force);
        let (changed, closed, volume) = detached.await?;
        let closed_connections = count(closed);
        Ok(DetachVolumeResponse { changed, closed_connections, volume })
    }

    async fn health(&self, asked: &HealthRequest) -> Result<HealthResponse> {
        self.0.describe_health(asked)
    }
}

#[tonic::async_trait]
impl PoolKind for Namespaces {
    async fn describe(&self, pool: &str) -> Result<Pool> {
        let described = self.0.describe_direct(Some(pool)).await?.pop();
        described.ok_or_else(|| Error::not_found("pool", pool))
    }

    async fn reopen(&self, pool: &str) -> Result<bool> {
        self.0.reopen_direct(pool).await
    }

    async fn create_volume(&self, asked: CreateVolumeRequest) -> Result<CreateVolumeResponse> {
        let (changed, volume) = self.0.create_direct(asked).await?;
        Ok(CreateVolumeResponse { changed, volume: Some(volume) })
    }

    async fn add_volume(&self, asked: AddVolumeRequest) -> Result<AddVolumeResponse> {
        let (created, volume) = self.0.add_direct(asked).await?;
        let volume = Some(volume);
        Ok(AddVolumeResponse { changed: created, created, volume, ..Default::default() })
    }

    async fn delete_volume(&self, asked: DeleteVolumeRequest) -> Result<DeleteVolumeResponse> {
        let volume = self.0.delete_direct(&asked.pool, &asked.name).await?;
        let changed = volume.is_some();
        Ok(DeleteVolumeResponse { changed, volume, ..Default::default() })
    }

    async fn get_volume(&self, asked: GetVolumeRequest) -> Result<Volume> {
        self.0.get_direct(&asked.pool, &asked.name).await
    }

    async fn list_volumes(&self, asked: &ListVolumesRequest) -> Result<ListVolumesResponse> {
        let volumes = self.0.list_direct(&asked.pool).await?;
        Ok(ListVolumesResponse { volumes, ..Default::default() })
    }

    #[expect(deprecated, reason = "older clients send and read size_gb")]
    async fn resize_volume(&self, asked: ResizeVolumeRequest) -> Result<ResizeVolumeResponse> {
        let size = size_of_request(asked.size_bytes, asked.size_gb)?;
        let resized = self.0.resize_direct(&asked.pool, &asked.name, size);
        let (changed, before, volume) = resized.await?;
        Ok(ResizeVolumeResponse {
            changed,
            previous_size_gb: to_wire_gb(before),
            previous_size_bytes: to_wire(before),
            volume: Some(volume),
            ..Default::default()
        })
    }

    /// Refuses: a volume that is a namespace has its device.
    async fn attach_volume(&self, asked: AttachVolumeRequest) -> Result<AttachVolumeResponse> {
        let volume = self.0.get_direct(&asked.pool, &asked.name).await?;
        let problem = if volume.device_path.is_empty() {
            let why = match volume.device_problem.as_str() {
                "" => "it is being removed",
                problem => problem,
            };
            format!("is a namespace of its own, and has no device now: {why}")
        } else {
            let path = volume.device_path;
            format!("is a namespace of its own, there is nothing to attach: use {path}")
        };
        Err(Error::in_use(format!("volume {}", shown(&asked.name)), problem))
    }

    async fn detach_volume(&self, asked: DetachVolumeRequest) -> Result<DetachVolumeResponse> {
        let volume = Some(self.0.get_direct(&asked.pool, &asked.name).await?);
        Ok(DetachVolumeResponse { volume, ..Default::default() })
    }

    async fn health(&self, asked: &HealthRequest) -> Result<HealthResponse> {
        self.0.health_of_direct(asked).await
    }
}
