-- Places jobs where their data may go and is cheap to have: JobSubmitPlugins=lua. Nodes of a site have its name as a feature.
-- slurmctld waits meanwhile, so this only reads small files.
local towline = dofile("/etc/slurm/towline.lua")

-- The constraint that holds where both `own` and `sites` do; nil if they cannot be joined.
local function joined(own, sites)
   if not own or own == "" then return sites end
   -- Brackets and counts cannot be joined, and parentheses of a user could end those that are put around them.
   if string.find(own, "[^%w_%-%.&|,]") then return nil end
   if string.find(own, "|", 1, true) then own = "(" .. own .. ")" end
   if string.find(sites, "|", 1, true) then sites = "(" .. sites .. ")" end
   return own .. "&" .. sites
end

local function names(sites)
   local list = {}
   for _, one in ipairs(sites) do table.insert(list, one.site) end
   return table.concat(list, "|")
end

function slurm_job_submit(job_desc, part_list, submit_uid)
   local wanted, problem = towline.directives(job_desc.script or job_desc.burst_buffer)
   if problem then
      slurm.log_user("%s", problem)
      return slurm.ERROR
   end
   if not wanted or #wanted.inputs == 0 then return slurm.SUCCESS end
   local placed, problems = towline.place(wanted.inputs, job_desc.user_name or tostring(submit_uid))
   for _, why in ipairs(problems) do slurm.log_user("towline: %s", why) end
   if #problems > 0 and wanted.stage_in then return slurm.ERROR end
   if not placed then
      slurm.log_user("towline: the job is placed without regard to its data")
      return slurm.SUCCESS
   end
   local best = placed.allowed[1]
   if not best then
      slurm.log_user("towline: its data may go to no site: %s", table.concat(placed.denied, "; "))
      return slurm.ERROR
   end
   -- What is fetched before the job starts is at one site.
   local sites = wanted.stage_in and { best } or placed.allowed
   local own, preferred = job_desc.features, job_desc.prefer
   local restricted = wanted.stage_in or #placed.denied > 0 or not placed.elsewhere
   if restricted then
      -- Slurm takes a preference in place of the constraint where it can be met, so both must hold the sites.
      for field, value in pairs({ features = own or "", prefer = preferred or "" }) do
         local both = joined(value, names(sites))
         if not both then
            slurm.log_user("towline: cannot join the constraint %s with the sites of its data: %s", value, names(sites))
            return slurm.ERROR
         end
         if field == "features" or value ~= "" then job_desc[field] = both end
      end
   end
   if #sites > 1 and (not preferred or preferred == "") then
      local prefer = joined(own, best.site)
      if prefer then job_desc.prefer = prefer end
   end
   job_desc.admin_comment = "towline:" .. best.site
   slurm.log_info("towline: user %s, best site %s, %d bytes missing, %d ms", job_desc.user_name or "?", best.site, best.missing, best.ms)
   return slurm.SUCCESS
end

-- Only root may change where a job with data may run.
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   local changed = job_desc.features or job_desc.prefer
   if modify_uid ~= 0 and changed and string.match(job_rec.admin_comment or "", "^towline:") then
      slurm.log_user("towline: the sites of its data decide where the job runs: submit it again")
      return slurm.ERROR
   end
   return slurm.SUCCESS
end

return slurm.SUCCESS
